"""Streaming, mergeable metrics that work under `jit`: AUC, log loss, recall and more.

A metric is a frozen pytree. `from_batch` makes one from a batch, `update` adds a batch,
and `merge` adds two metrics. `compute` returns a float32 scalar, which is NaN if the
samples don't determine the value. Samples with weight 0 are ignored, even if they hold
NaN.
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
