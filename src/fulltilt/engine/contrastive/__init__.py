"""The phases of a contrastive training, each a run of its own."""
