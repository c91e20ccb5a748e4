"""Data sets: batches of samples from files, or from a known teacher.

What all data sets share:

* `batch`: a batch, the interface of a data set, and the error of damaged data.
* `block_dataset`: batches, epochs and held-out samples of any reader of samples.
* `block_order`: the order of an epoch, shuffled by blocks.
* `batch_part`: cuts the part of one process out of a batch, and joins parts.
* `digests`: the digest by which a resumed run finds other samples in its files.
* `random_streams`, `argument_checks`: random generators of a seed; checks of counts.

Criteo's text:

* `criteo`: the data set.
* `criteo_lines`: the reader of one file, or of one per day.
* `criteo_parser`: the fields of lines and their checks, by pyarrow.csv.
* `criteo_format`: the conversion of fields to dense inputs and row ids.
* `line_blocks`: random access to the lines of a text file.

Other files:

* `multi_hot_clicks`: the arrays of MLPerf's DLRM-DCNv2.
* `array_files`, `mapped_file`: arrays of .npy and .npz files, mapped into memory.
* `parquet_rows`, `parquet_columns`: Parquet files; the declaration of their columns.
* `pyarrow_modules`: imports pyarrow, or says how to install it.
* `movielens`: MovieLens-100K.

Synthetic samples, whose best possible loss is known:

* `teacher`: the base, which draws labels and computes the best log loss.
* `synthetic_clicks`: a small log with every kind of id column, the default of a run.
* `synthetic_stream`: users and items that come and go, with 64-bit ids.
* `synthetic_criteo`: samples in the shape of Criteo's logs, and a file of them.
* `interactions`: users and the items that they choose, for retrieval.
* `zipf`: ids of skewed popularity.

Histories of events, for MLPerf's `dlrm_v4`:

* `yambda`: reads the public log Yambda, or draws one, and makes samples of it.
"""
