"""Trains the model of dlrm_v4 on Yambda-50m, the public log of 10,000 users.

MLPerf defines no small version of its benchmark; this one is of this package. Model,
history and order of the data are those of `dlrm_v4`. The log keeps the ids of the whole
data set, so users, items, artists and albums get new ids without gaps. Tables of pairs
and triples with the user have a hundredth of the benchmark's rows, and other ones a
tenth. Tables and slot variables take 25 GB. Batch and learning rates are of this
package, too: those of the benchmark would change nothing in so few steps.

The files are `flat/50m/multi_event.parquet`, `artist_item_mapping.parquet` and
`album_item_mapping.parquet` of the data set yandex/yambda on Hugging Face (Apache-2.0).

The whole last day is held out. A checkpoint takes 25 GB, and up to four lie on the disk
at a time.

Command: tpu-embedding train dlrm_v4_50m --data-dir DIRECTORY
         tpu-embedding compile dlrm_v4_50m --topology v5e:2x4
Hardware: 8 TPU chips, to train
Expected: held-out AUC of at least 0.75, the benchmark's target on the whole log; never
  trained
Wall time: unknown
"""

import dataclasses

import optax

from tpu_embedding import optimizers
from tpu_embedding.tools.train import YambdaSource, load_config, warm_up

WARM_UP_STEPS = 1000

config = dataclasses.replace(
    load_config("dlrm_v4"),
    name="dlrm_v4_50m",
    data=YambdaSource(
        has_dense_ids=True,
        whole_window="last",
        table_sizes={
            # Upper limits: an item has one artist and one album.
            "item_id": 1_000_000,
            "artist_id": 1_000_001,
            "album_id": 1_000_001,
            "uid": 10_000,
            "user_x_artist": 1_000_000,
            "user_x_album": 400_000,
            "user_x_hour": 240_000,
            "item_x_hour": 4_000_000,
            "artist_x_hour": 3_200_000,
            "user_x_is_organic": 20_000,
            "user_x_artist_x_hour": 400_000,
        },
    ),
    batch_size=512,
    # About one pass over 23 million anchors.
    num_steps=45_000,
    table_learning_rate=1e-2,
    dense_learning_rate=1e-3,
    make_table_optimizer=lambda run: optimizers.rowwise_adagrad(
        warm_up(run.table_learning_rate, WARM_UP_STEPS),
        initial_accumulator_value=0.0,
        epsilon=1e-8,
    ),
    make_dense_optimizer=lambda run: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(
            warm_up(run.dense_learning_rate, WARM_UP_STEPS),
            b1=0.95,
            b2=0.999,
            eps=1e-8,
        ),
    ),
    log_every=100,
    evaluate_every=4500,
    checkpoint_every=4500,
    checkpoints_kept=3,
)
