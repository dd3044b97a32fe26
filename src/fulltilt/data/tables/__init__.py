"""Datasets of rows, above all in HDF5 files of any layout."""
