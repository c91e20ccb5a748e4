"""Reads batches from Parquet files, or draws synthetic ones with a known best loss.

A run config names a source, which is a frozen dataclass. Its `open` method makes the
data set. docs/guides/input_data.md shows how to write your own source.
"""
