"""Samples of MLPerf's `dlrm_v4` benchmark, from logs of events.

* `xxhash64`: the hash that makes rows of pairs and triples of ids.
* `yambda_files`: reads the Parquet files of Yambda.
* `event_log`: events sorted by user and time.
* `event_samples`: candidates, their histories and crossed ids.
* `event_batches`: batches in the order of the benchmark, by windows of time.
* `event_dataset`: such batches as a data set of the training loop, and their outline.
* `synthetic_yambda`: a synthetic log, whose best AUC is known.
* `exact_auc`: the metric of the benchmark.
"""
