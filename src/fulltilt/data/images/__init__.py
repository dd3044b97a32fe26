"""Datasets of images, in memory and in files."""
