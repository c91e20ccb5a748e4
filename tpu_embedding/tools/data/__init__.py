"""Data sets: batches of samples from files, or from a known teacher.

A run config names its data by a source, which is a frozen dataclass defined next to its
reader. The source's `open` returns the data set.

* `batch`: batches, the interfaces of data sets and sources, and the error for bad data.
* `block_dataset`: a data set over any reader of samples, shuffled by blocks.

Files:

* `parquet`: Parquet files with columns of ids and of lists.
* `criteo`: Criteo's logs, converted to Parquet.

Synthetic samples with a known best loss:

* `teacher`: the base, which draws popular ids and labels.
* `synthetic_clicks`: a small log with every kind of id column, and Criteo-like logs.
* `synthetic_stream`: users and items that come and go, with 64-bit ids.
* `synthetic_interactions`: users and the items that they choose, for retrieval.
"""
