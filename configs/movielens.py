"""Trains a rating model on MovieLens-100K from users, movies and histories.

Command: tpu-embedding train movielens --data-dir ml-100k --devices 8
Hardware: 8 emulated devices on 2 CPU cores
Expected: RMSE on u1.test at most 0.94 (measured: 0.906, mean of seeds 0, 1, 2)
Wall time: about 40 s
"""

import optax

from tpu_embedding import optimizers
from tpu_embedding.tools.train import MovieLensSource, RunConfig, Target
from tpu_embedding.tools.train.models import RatingModelConfig

config = RunConfig(
    name="movielens",
    # Data: 800 steps are 10 epochs.
    data=MovieLensSource(max_history=100),
    batch_size=1000,
    # Model
    model=RatingModelConfig(dim=32, initial_deviation=0.01, l2=0.1),
    loss="squared_error",
    target=Target(metric="rmse", at_most=0.94),
    # Optimizers: the tables' learning rate rises during the first 5 % of the run, and
    # then follows a cosine down to 1 % of its peak.
    num_steps=800,
    table_learning_rate=0.005,
    dense_learning_rate=0.001,
    make_table_optimizer=lambda run: optimizers.adam(
        optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=run.table_learning_rate,
            warmup_steps=run.num_steps // 20,
            decay_steps=run.num_steps,
            end_value=0.01 * run.table_learning_rate,
        ),
        beta_2=0.99,
        epsilon=1e-8,
        sum_inside_sqrt=False,
    ),
    make_dense_optimizer=lambda run: optax.adam(run.dense_learning_rate),
    # Reports
    log_every=40,
    evaluate_every=80,
    checkpoint_every=400,
)
