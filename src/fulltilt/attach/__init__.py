"""The way into a training script that stays as it is. ``inside/`` runs there and imports nothing of fulltilt."""
