"""Metrics as streaming, mergeable values under `jit`: AUC, log loss, recall and others.

A metric is a frozen pytree. `from_batch` makes one, `merge` adds two, and `update` does
both. `compute` returns a float32 scalar: NaN if the samples do not determine the value.
Samples of weight 0 count for nothing, even if their values are NaN.

`metric` has what all metrics share. `auc`, `means` and `ranking` have the metrics,
`score_order` compares scores exactly, and `sums` has the exact sums below them.
"""

from tpu_embedding.metrics.auc import AUC as AUC
from tpu_embedding.metrics.means import MAE as MAE
from tpu_embedding.metrics.means import RMSE as RMSE
from tpu_embedding.metrics.means import Calibration as Calibration
from tpu_embedding.metrics.means import LogLoss as LogLoss
from tpu_embedding.metrics.means import Mean as Mean
from tpu_embedding.metrics.means import NormalizedEntropy as NormalizedEntropy
from tpu_embedding.metrics.metric import Metric as Metric
from tpu_embedding.metrics.metric import compute as compute
from tpu_embedding.metrics.metric import merge as merge
from tpu_embedding.metrics.ranking import NDCGAtK as NDCGAtK
from tpu_embedding.metrics.ranking import Ranks as Ranks
from tpu_embedding.metrics.ranking import RecallAtK as RecallAtK
from tpu_embedding.metrics.sums import Sum as Sum
