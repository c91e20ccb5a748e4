"""Histories of events for MLPerf's `dlrm_v4`, from the public log Yambda.

* `yambda_files`: reads the files of Yambda.
* `synthetic_yambda`: draws a log of users whose tastes are known.
* `event_log`: the events of both, sorted by user and time.
* `event_dataset`: samples of a log: candidates, their histories, and crossed ids, in
  batches in the order of the benchmark.
* `xxhash64`: the hash of the benchmark.
"""
