"""Several processes that train one model: how they start, talk, share a batch, and end."""
