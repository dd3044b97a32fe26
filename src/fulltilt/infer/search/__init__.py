"""The fastest way to answer with a model that keeps its accuracy and meets its targets, found by measuring."""
