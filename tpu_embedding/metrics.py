"""Streaming, mergeable metrics that work under `jit`: AUC, log loss, recall and more.

A metric is a frozen pytree. `from_batch` makes a metric from a batch, `merge` adds two
metrics, and `update` adds a batch to a metric. `compute` returns a float32 scalar; it
is NaN if the samples do not determine the value. Samples with weight 0 are ignored,
even if their values are NaN.

The metrics are implemented in `tpu_embedding.recommenders`.
"""

from tpu_embedding.recommenders.click_metrics import AUC as AUC
from tpu_embedding.recommenders.click_metrics import MAE as MAE
from tpu_embedding.recommenders.click_metrics import RMSE as RMSE
from tpu_embedding.recommenders.click_metrics import Calibration as Calibration
from tpu_embedding.recommenders.click_metrics import LogLoss as LogLoss
from tpu_embedding.recommenders.click_metrics import Mean as Mean
from tpu_embedding.recommenders.click_metrics import (
    NormalizedEntropy as NormalizedEntropy,
)
from tpu_embedding.recommenders.metric import Metric as Metric
from tpu_embedding.recommenders.metric import Sum as Sum
from tpu_embedding.recommenders.metric import compute as compute
from tpu_embedding.recommenders.metric import merge as merge
from tpu_embedding.recommenders.ranking_metrics import NDCGAtK as NDCGAtK
from tpu_embedding.recommenders.ranking_metrics import Ranks as Ranks
from tpu_embedding.recommenders.ranking_metrics import RecallAtK as RecallAtK
