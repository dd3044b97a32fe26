"""Text that is written word by word: decoding with a cache, its measurement, and its service."""
