"""How samples are ordered, held, loaded by workers, and what is done about bad ones."""
