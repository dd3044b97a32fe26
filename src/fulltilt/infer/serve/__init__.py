"""Serve an artefact over HTTP: batches by length, a cache, limits, metrics, a page; on this machine or through Ray."""
