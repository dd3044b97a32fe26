"""Which measured plans are chosen, and what decides between them."""
