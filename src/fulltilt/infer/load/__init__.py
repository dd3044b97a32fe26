"""Load on a model or a server: arrivals that are drawn beforehand, responses that count from them."""
