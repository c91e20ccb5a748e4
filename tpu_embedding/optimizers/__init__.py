"""Optimizers of embedding tables: optax transformations that treat each row for itself.

| optimizer | slot variables | bytes per row of dim D |
|---|---|---|
| `sgd` | none | 0 |
| `adagrad` | accumulators `[rows, D]` | 4 D |
| `rowwise_adagrad` | accumulators `[rows]` | 4 |
| `adagrad_momentum` | accumulators, momenta `[rows, D]` | 8 D |
| `momentum` | momenta `[rows, D]` | 4 D |
| `proximal_adagrad` | accumulators `[rows, D]` | 4 D |
| `adam` | momenta, velocities `[rows, D]` | 8 D |
| `ftrl` | accumulators, linears `[rows, D]` | 8 D |
| `rmsprop` | ms, mom `[rows, D]`, and mg if centered | 8 D, 12 D |
| `adadelta` | accumulators, updates `[rows, D]` | 8 D |
| `lion` | momenta `[rows, D]` | 4 D |

A layer takes these and any other row-local optax transformation, and applies it to the
touched rows by `lift_to_rows`; `every_row` applies it to all rows, as dense optimizers
do, and `in_sequence` once per occurrence of an id. `with_options` adds what TensorFlow
has on all of them: clipping of gradients and rows, and weight decay.
"""

from tpu_embedding.optimizers._adafactor import adafactor as adafactor
from tpu_embedding.optimizers._adagrad import adagrad as adagrad
from tpu_embedding.optimizers._adagrad import adagrad_momentum as adagrad_momentum
from tpu_embedding.optimizers._adagrad import rowwise_adagrad as rowwise_adagrad
from tpu_embedding.optimizers._adagrad import scale_by_adagrad as scale_by_adagrad
from tpu_embedding.optimizers._adagrad import (
    scale_by_adagrad_momentum as scale_by_adagrad_momentum,
)
from tpu_embedding.optimizers._adagrad import (
    scale_by_rowwise_adagrad as scale_by_rowwise_adagrad,
)
from tpu_embedding.optimizers._adam import adam as adam
from tpu_embedding.optimizers._adam import scale_by_lazy_adam as scale_by_lazy_adam
from tpu_embedding.optimizers._assign import assign as assign
from tpu_embedding.optimizers._bounded_adagrad import bounded_adagrad as bounded_adagrad
from tpu_embedding.optimizers._clippy import clippy_adagrad as clippy_adagrad
from tpu_embedding.optimizers._frequency import (
    frequency_aware_adagrad as frequency_aware_adagrad,
)
from tpu_embedding.optimizers._frequency import (
    frequency_estimator as frequency_estimator,
)
from tpu_embedding.optimizers._frequency import frequency_weights as frequency_weights
from tpu_embedding.optimizers._ftrl import ftrl as ftrl
from tpu_embedding.optimizers._lion import lion as lion
from tpu_embedding.optimizers._momentum import momentum as momentum
from tpu_embedding.optimizers._proximal import proximal_adagrad as proximal_adagrad
from tpu_embedding.optimizers._refused import mdl_adagrad_light as mdl_adagrad_light
from tpu_embedding.optimizers._rmsprop import adadelta as adadelta
from tpu_embedding.optimizers._rmsprop import rmsprop as rmsprop
from tpu_embedding.optimizers._rowwise import lamb as lamb
from tpu_embedding.optimizers._rowwise import (
    partial_rowwise_adam as partial_rowwise_adam,
)
from tpu_embedding.optimizers._rowwise import (
    partial_rowwise_lamb as partial_rowwise_lamb,
)
from tpu_embedding.optimizers._rowwise import rowwise_rmsprop as rowwise_rmsprop
from tpu_embedding.optimizers._sgd import sgd as sgd
from tpu_embedding.optimizers._user_defined import user_defined as user_defined
from tpu_embedding.optimizers._yogi import online_yogi as online_yogi
from tpu_embedding.optimizers._yogi import proximal_yogi as proximal_yogi
from tpu_embedding.optimizers.hyperparameters import (
    with_hyperparameters as with_hyperparameters,
)
from tpu_embedding.optimizers.keras_config import from_keras_config as from_keras_config
from tpu_embedding.optimizers.modes import every_row as every_row
from tpu_embedding.optimizers.modes import in_sequence as in_sequence
from tpu_embedding.optimizers.options import clip_gradients as clip_gradients
from tpu_embedding.optimizers.options import clip_rows as clip_rows
from tpu_embedding.optimizers.options import decay_rows as decay_rows
from tpu_embedding.optimizers.options import with_options as with_options
from tpu_embedding.optimizers.row_local import NotRowLocalError as NotRowLocalError
from tpu_embedding.optimizers.row_local import check_row_local as check_row_local
from tpu_embedding.optimizers.row_optimizer import RowOptimizer as RowOptimizer
from tpu_embedding.optimizers.row_optimizer import TableOptimizer as TableOptimizer
from tpu_embedding.optimizers.slot_storage import with_slot_storage as with_slot_storage
from tpu_embedding.optimizers.table_rows import table_rows as table_rows
