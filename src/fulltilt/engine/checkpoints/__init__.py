"""How the state of a training is written, read again and exported."""
