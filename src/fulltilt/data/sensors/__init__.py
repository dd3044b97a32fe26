"""Events of a sensor array."""
