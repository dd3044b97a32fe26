"""Where the checkpoints of a run lie. Torch-free: an interrupted command says by them what is saved."""

from pathlib import Path

NEWEST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def find_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in (NEWEST, PREVIOUS))
