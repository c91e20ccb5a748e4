"""Parts of recommenders that import the layer, and that the layer never imports.

Users find their names in `te.metrics`, `te.nn`, `te.functional` and `te.inputs`.

* `metric`: what all metrics share. `click_metrics`, `ranking_metrics`: the metrics.
* `ranking_losses`: in-batch softmax, pairwise and listwise losses.
* `interactions`: layers that let the features of a sample act on each other.
* `best_rows`: the rows of a table with the largest scalar products. `retrieval`: the
  same for a Flax layer.
* `unique_ids`: names each id of a device once, and expands rows to samples.
"""
