"""Serve a lab over HTTP: to people and their commands, and to the runners of attempts."""
