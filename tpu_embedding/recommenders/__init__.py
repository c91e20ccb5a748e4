"""Parts of recommenders. They import the layer, which never imports them.

Public names are in `te.metrics`, `te.nn`, `te.functional` and `te.inputs`.

* `metric`: base of all metrics, which are in `click_metrics` and `ranking_metrics`.
* `ranking_losses`: in-batch and sampled softmax, pairwise and listwise losses.
* `feature_interactions`: layers that combine the features of a sample.
* `best_rows`: finds the rows of a table that have the largest scalar products with
  queries. `retrieval` does the same for a Flax layer.
* `unique_ids`: finds the unique ids of a device, and expands rows to samples.
"""
