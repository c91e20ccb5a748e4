"""Optimizers for embedding tables: row-local optax transformations.

A table or layer accepts any of these optimizers, a name such as `"adagrad"`, or a Keras
optimizer. docs/guides/optimizers.md shows how to choose. Equations and slot bytes per
row are in docs/guides/optimizer_catalogue.md. An *optimizer* is the value you pass. Its
*rule* is the arithmetic on rows. *Slot variables* are state arrays with one entry per
row. By default, a step changes only the rows that it looks up. `every_row` and a few
options update all rows. To read the code, start with the types in `row_optimizer`. Then
read `resolve` (it decides how a layer applies an optimizer), `probe` and `rules/`.
"""

from tpu_embedding.optimizers.averages import with_ema as with_ema
from tpu_embedding.optimizers.keras import from_keras_config as from_keras_config
from tpu_embedding.optimizers.learning_rates import (
    with_hyperparameters as with_hyperparameters,
)
from tpu_embedding.optimizers.options import with_options as with_options
from tpu_embedding.optimizers.resolve import check_row_local as check_row_local
from tpu_embedding.optimizers.row_optimizer import NotRowLocalError as NotRowLocalError
from tpu_embedding.optimizers.row_optimizer import RowOptimizer as RowOptimizer
from tpu_embedding.optimizers.row_optimizer import TableOptimizer as TableOptimizer
from tpu_embedding.optimizers.row_optimizer import every_row as every_row
from tpu_embedding.optimizers.row_optimizer import in_sequence as in_sequence
from tpu_embedding.optimizers.rules.adafactor import adafactor as adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad as adagrad
from tpu_embedding.optimizers.rules.adagrad import adagrad_momentum as adagrad_momentum
from tpu_embedding.optimizers.rules.adagrad import (
    bounded_adagrad as bounded_adagrad,
)
from tpu_embedding.optimizers.rules.adagrad import clippy_adagrad as clippy_adagrad
from tpu_embedding.optimizers.rules.adagrad import (
    frequency_aware_adagrad as frequency_aware_adagrad,
)
from tpu_embedding.optimizers.rules.adagrad import (
    frequency_estimator as frequency_estimator,
)
from tpu_embedding.optimizers.rules.adagrad import (
    frequency_weights as frequency_weights,
)
from tpu_embedding.optimizers.rules.adagrad import proximal_adagrad as proximal_adagrad
from tpu_embedding.optimizers.rules.adagrad import rowwise_adagrad as rowwise_adagrad
from tpu_embedding.optimizers.rules.adam import adadelta as adadelta
from tpu_embedding.optimizers.rules.adam import adam as adam
from tpu_embedding.optimizers.rules.adam import online_yogi as online_yogi
from tpu_embedding.optimizers.rules.adam import proximal_yogi as proximal_yogi
from tpu_embedding.optimizers.rules.adam import rmsprop as rmsprop
from tpu_embedding.optimizers.rules.ftrl import ftrl as ftrl
from tpu_embedding.optimizers.rules.lazy_adam import adamw as adamw
from tpu_embedding.optimizers.rules.lazy_adam import lazy_adam as lazy_adam
from tpu_embedding.optimizers.rules.rowwise import lamb as lamb
from tpu_embedding.optimizers.rules.rowwise import (
    partial_rowwise_adam as partial_rowwise_adam,
)
from tpu_embedding.optimizers.rules.rowwise import (
    partial_rowwise_lamb as partial_rowwise_lamb,
)
from tpu_embedding.optimizers.rules.rowwise import rowwise_rmsprop as rowwise_rmsprop
from tpu_embedding.optimizers.rules.sgd import assign as assign
from tpu_embedding.optimizers.rules.sgd import lion as lion
from tpu_embedding.optimizers.rules.sgd import momentum as momentum
from tpu_embedding.optimizers.rules.sgd import sgd as sgd
from tpu_embedding.optimizers.rules.user_defined import user_defined as user_defined
from tpu_embedding.optimizers.table_rows import table_rows as table_rows
