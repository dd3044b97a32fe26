"""Serve an artefact over HTTP, on this machine or through Ray."""
