"""Trains a click model on the rows of a CSV file, whose columns it recognises.

Command: tpu-embedding train clicks.csv --label label
         tpu-embedding train csv_file --data-dir clicks.csv --set data.label=label
Hardware: 2 CPU cores
Expected: held-out AUC above 0.5, the AUC of chance; how far depends on your data
Wall time: 8 s for 32,561 rows of 15 columns

The first command also adapts batch size, steps and reports to the number of rows; see
`csv_run` in `tpu_embedding/tools/train/origin.py`. Copy this file as a starting point.
"""

import optax

from tpu_embedding import optimizers
from tpu_embedding.tools.train import CsvSource, RunConfig, Target
from tpu_embedding.tools.train.models import ClickModelConfig

config = RunConfig(
    name="csv_file",
    # Data
    data=CsvSource(label="label"),
    batch_size=512,
    # Model
    model=ClickModelConfig(
        dim=16, hidden_sizes=(64, 32), interactions="products", initial_deviation=0.01
    ),
    loss="log_loss",
    target=Target(metric="auc", at_least=0.5),
    # Optimizers: both learning rates fall linearly to 2 % of their initial value.
    num_steps=1000,
    table_learning_rate=0.1,
    dense_learning_rate=0.004,
    make_table_optimizer=lambda run: optimizers.adagrad(
        optax.linear_schedule(
            run.table_learning_rate, 0.02 * run.table_learning_rate, run.num_steps
        ),
        initial_accumulator_value=1e-4,
    ),
    make_dense_optimizer=lambda run: optax.adam(
        optax.linear_schedule(
            run.dense_learning_rate, 0.02 * run.dense_learning_rate, run.num_steps
        )
    ),
    # Reports
    log_every=100,
    evaluate_every=250,
    checkpoint_every=250,
    keep_best=True,
    patience=3,
)
