"""Datasets of rows, above all HDF5 of any layout."""
