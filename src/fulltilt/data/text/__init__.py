"""Text as tokens: preparing a folder of them, and reading it."""
