"""Train one model in several processes (ranks): start them, let them talk, divide batches, and end them."""
