"""Data sets: batches of samples from files, or from a known teacher.

A run config has a source, a frozen dataclass next to its reader; `open` makes a data
set of it. What all of them share:

* `source`: the interface of a source, and helpers of those in this package.
* `batch`: a batch, the interface of a data set, and the error of damaged data.
* `block_dataset`: batches, epochs and held-out samples of any reader of samples, in an
  order shuffled by blocks.
* `random_streams`: random generators of a seed.

Files:

* `csv_clicks`, `csv_rows`, `csv_columns`: a CSV file, whose columns are recognised.
* `parquet`, `parquet_rows`: Parquet files with columns of ids and of lists.
* `criteo`, `criteo_to_parquet`: Criteo's logs, and the converter of their text.

Synthetic samples, whose best possible loss is known:

* `teacher`: the base, which draws labels and computes the best log loss.
* `synthetic_clicks`: a small log with every kind of id column, the default of a run.
* `synthetic_stream`: users and items that come and go, with 64-bit ids.
* `synthetic_criteo`: samples in the shape of Criteo's logs.
* `interactions`: users and the items that they choose, for retrieval.
* `zipf`: ids of skewed popularity.
"""
