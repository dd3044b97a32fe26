"""What a search tells: the result, its files, its hints, and how a pick is applied and verified."""
