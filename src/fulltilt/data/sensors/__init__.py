"""Sensor data as the guides have it."""
