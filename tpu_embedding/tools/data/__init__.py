"""Reads batches from Parquet logs, or draws them from a teacher with a known best loss.

A run config names a source, a frozen dataclass whose `open` makes the data set.
docs/guides/input_data.md shows how to write your own.
"""
