"""Observe a training script without changing it. ``inside/`` runs in the script and imports nothing of fulltilt."""
