"""Trains dynamic tables on clicks of users and items that come and go.

At any step, 2,000 users and 1,000 items are alive, each for 500 steps. Over a run,
10,000 users and 5,000 items appear. Their popularity follows Zipf's law.

data.vocabulary selects the tables:
  dynamic: 1.3 places per living id, rounded up to whole buckets; unused ids are evicted
  hashed: a static table with the same number of bytes, indexed by a hash of the id. It
    has 1.125 times as many rows, since a dynamic place takes 144 bytes: 128 for row and
    accumulators, and 16 for key and score
  unlimited: a row for each id that ever appears

Command: tpu-embedding train synthetic_stream --devices 1
         (--set data.vocabulary=hashed --output-dir hashed)
Hardware: 2 CPU cores
Expected: log loss at most 1.05 times the teacher's on held-out samples of the last
  step's ids (measured, mean of seeds 1, 2 and 3: 1.034; hashed tables 1.090, unlimited
  tables 1.034)
Wall time: about 20 s
"""

import optax

from tpu_embedding import optimizers
from tpu_embedding.tools.train import RunConfig, SyntheticStreamSource, Target
from tpu_embedding.tools.train.models import ClickModelConfig

DIM = 16
NUM_STEPS = 2000

config = RunConfig(
    name="synthetic_stream",
    # Data
    data=SyntheticStreamSource(
        num_users=2_000,
        num_items=1_000,
        life_steps=500,
        evaluation_step=NUM_STEPS - 1,
        num_evaluation_samples=102_400,
        row_bytes=2 * 4 * DIM,  # a row and its accumulators
    ),
    batch_size=2048,
    # Model
    model=ClickModelConfig(dim=DIM, hidden_sizes=(64, 32)),
    loss="log_loss",
    target=Target(metric="log_loss", at_most=1.05, relative_to="teacher"),
    # Optimizers: a stream never ends, so the learning rates stay constant.
    num_steps=NUM_STEPS,
    table_learning_rate=1.0,
    dense_learning_rate=0.003,
    make_table_optimizer=lambda run: optimizers.adagrad(
        run.table_learning_rate, initial_accumulator_value=1e-6
    ),
    make_dense_optimizer=lambda run: optax.adam(run.dense_learning_rate),
    # Reports
    log_every=100,
    evaluate_every=500,
    checkpoint_every=0,
)
