"""One optimizer step: forward, backward, update, and what feeds it batches."""
