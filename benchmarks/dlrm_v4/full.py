"""Trains MLPerf Training's dlrm_v4_hstu: clicks from histories of music, by HSTU.

Sizes, order of the data, optimizers and schedule come from the benchmark, v6.1, at a
global batch of 8,192; see `recommendation` in github.com/mlcommons/training. With
--data-dir, the config reads Yambda-5b's flat Parquet files. MLPerf's prepared download
has none, so it cannot be read. The log is sorted in memory, so the host needs 220 GB.

11 tables have 293 million rows of 512 values. With slot variables they take 601 GB, so
the config needs a TPU slice. The first command compiles it for one on any machine, and
allocates nothing. By the compiler, a step needs so much memory per device:

    v5p:2x2x4    16 chips               46.5 of 95 GiB, temporaries 11.1 GiB
    tpu7x:2x2x2   8 chips, 16 devices   47.3 of 96 GiB, temporaries 12.0 GiB
    v5p:2x4x4    32 chips               25.6 of 95 GiB, temporaries 7.85 GiB
    v6e:4x8      32 chips               25.6 of 32 GiB, temporaries 7.85 GiB
    v6e:8x8      64 chips               14.7 of 32 GiB, temporaries 5.7 GiB

A device computes 32 samples at a time, `model.hstu.micro_batch_size`. `small.py` trains
a small version on a laptop.

The run writes `mlperf.log` for the closed division of MLPerf. The checker of the
package `mlperf-logging` accepts its keys and the times of its evaluations.

A checkpoint takes 601 GB. One is written every 2,800 steps and the latest is kept, so
the disk needs 1.2 TB: the older one goes when the new one is complete.

Command: tpu-embedding compile benchmarks/dlrm_v4/full.py --topology v5p:2x2x4
         tpu-embedding train benchmarks/dlrm_v4/full.py --data-dir DIRECTORY
Hardware: 16 TPU v5p chips, to train
Expected: held-out AUC of at least 0.75, the benchmark's target; never trained at full
  size. The reference needs 69 million samples, which are 8,460 steps
Wall time: unknown
"""

from typing import Any

import optax
from dlrm_v4_model import DLRMv4Config
from histories import YambdaSource
from hstu_layers import HSTUSizes
from mlperf import MLPerfLog

from tpu_embedding import optimizers
from tpu_embedding.tools.train import RunConfig, Target, warm_up

WARM_UP_STEPS = 24_000

ADAM: dict[str, Any] = {"b1": 0.95, "b2": 0.999, "eps": 1e-8}

TABLE_SIZES = {
    "item_id": 9_390_624,
    "artist_id": 1_293_395,
    "album_id": 3_367_692,
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}

config = RunConfig(
    name="dlrm_v4",
    # Data: histories of up to 4,086 events, 2,663 in the mean.
    data=YambdaSource(table_sizes=TABLE_SIZES),
    batch_size=8192,
    # Model
    model=DLRMv4Config(
        hstu=HSTUSizes(
            dim=512,
            num_layers=3,
            num_heads=4,
            head_dim=128,
            token_hidden_size=256,
            item_hidden_size=512,
            num_contextual=8,
            num_positions=8192,
            num_time_buckets=2048,
            input_dropout=0.2,
            dropout=0.1,
        ),
    ),
    loss="log_loss",
    loss_weight=0.2,
    max_dense_norm=1.0,
    target=Target(metric="auc", at_least=0.75),
    # Optimizers: both learning rates rise linearly from 0. The benchmark's target falls
    # before the end of the warm-up.
    num_steps=12_000,
    table_learning_rate=1e-6,
    dense_learning_rate=1e-6,
    make_table_optimizer=lambda run: optimizers.rowwise_adagrad(
        warm_up(run.table_learning_rate, WARM_UP_STEPS),
        initial_accumulator_value=0.0,
        epsilon=1e-8,
    ),
    make_dense_optimizer=lambda run: optax.adam(
        warm_up(run.dense_learning_rate, WARM_UP_STEPS), **ADAM
    ),
    # Reports: the benchmark evaluates after each 2,293,760 samples, and the closed
    # division first at 57 million.
    log_every=10,
    evaluate_every=280,
    evaluate_from=7000,
    checkpoint_every=2800,
    checkpoints_kept=1,
    # MLPerf's log
    on_event=MLPerfLog(
        benchmark="dlrmv4",
        division="closed",
        keys={
            "train_samples": 2_290_835_423,
            "eval_samples": 2_058_204,
            "max_sequence_length": 4096,
            "micro_batch_size": 32,
            "gradient_accumulation_steps": 1,
            "lowest_numerical_precision_in_linear": "bfloat16",
            "lowest_numerical_precision_in_attn": "bfloat16",
            "lowest_numerical_precision_in_comm": "fp32",
            "opt_name": "Adam",
            "opt_adam_beta_1": ADAM["b1"],
            "opt_adam_beta_2": ADAM["b2"],
            "opt_adam_epsilon": ADAM["eps"],
            "opt_weight_decay": 0.0,
            "opt_sparse_name": "RowWiseAdagrad",
            "opt_learning_rate_warmup_steps": WARM_UP_STEPS,
            "opt_learning_rate_warmup_start_lr": 0.0,
        },
    ),
)
