"""Trains DLRM on Criteo's click log, or on synthetic rows of the same shape.

Command: tpu-embedding train dlrm --devices 8
         python scripts/criteo_to_parquet.py train.txt train.parquet
         tpu-embedding train dlrm --data-dir train.parquet
Hardware: 8 emulated devices on 2 CPU cores
Expected: on synthetic rows, held-out log loss at most 1.05 times the teacher's
  (measured: 1.03)
Wall time: about 90 s

Without --data-dir, the rows are synthetic. For the real log, increase
data.vocabulary_size, num_steps and data.num_evaluation_samples. The log's last day is
about the last seventh of train.txt, 6.5 million lines.
"""

import optax

from tpu_embedding import optimizers
from tpu_embedding.tools.train import CriteoSource, RunConfig, Target
from tpu_embedding.tools.train.models import DLRMConfig

config = RunConfig(
    name="dlrm",
    # Data
    data=CriteoSource(vocabulary_size=2_000, num_evaluation_samples=65_536),
    batch_size=2048,
    # Model
    model=DLRMConfig(
        dim=16, bottom_sizes=(128, 64), top_sizes=(128, 64), initial_deviation=0.01
    ),
    loss="log_loss",
    target=Target(metric="log_loss", at_most=1.05, relative_to="teacher"),
    # Optimizers: both learning rates fall linearly to 2 % of their initial value.
    num_steps=1500,
    table_learning_rate=0.1,
    dense_learning_rate=0.005,
    make_table_optimizer=lambda run: optimizers.rowwise_adagrad(
        optax.linear_schedule(
            run.table_learning_rate, 0.02 * run.table_learning_rate, run.num_steps
        ),
        initial_accumulator_value=1e-6,
    ),
    make_dense_optimizer=lambda run: optax.adam(
        optax.linear_schedule(
            run.dense_learning_rate, 0.02 * run.dense_learning_rate, run.num_steps
        )
    ),
    # Reports
    log_every=100,
    evaluate_every=500,
    checkpoint_every=500,
)
