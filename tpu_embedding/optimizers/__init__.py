"""Optimizers for embedding tables, as row-local optax transformations.

`docs/guides/optimizer_catalogue.md` lists every optimizer with its equation, its bytes
of slot variables per row, and its equivalents in TensorFlow, Keras, optax and FBGEMM.
Four things to know first:

1. **Choosing one.** A table or the layer accepts
   `optimizer=te.optimizers.adagrad(0.1)`, a name with a default rate such as
   `optimizer="adagrad"`, a Keras optimizer, or any row-local optax transformation.
   Row-local means that a row's update does not depend on other rows; `check_row_local`
   checks this. `from_keras_config` translates a Keras optimizer.
2. **Touched rows or every row.** By default, a step changes only the rows that it looks
   up ("lazy" updates), so a row's momentum decays only in steps that look the row up.
   `every_row` changes all rows in each step, as dense optimizers do, at the cost of a
   pass over the table.
3. **Learning rates.** A rate is a scalar or an optax schedule, a function of the step
   counted from 0. To change it between steps without recompiling, use
   `optax.inject_hyperparams` and `with_hyperparameters`, or
   `tpu_embedding.nn.set_each_step` with a function.
4. **Options.** Most optimizers accept the keyword arguments of `with_options`: bounds
   on gradients and rows, weight decay, and the dtype and initial values of slot
   variables. `with_ema` adds moving averages of the rows.

An *optimizer* is the value that the user passes. A *rule* is the optimizer's arithmetic
on rows. *Slot variables* are the part of the optimizer's state that has one entry per
row.

The files, in reading order:

* `rules/`: the algorithms. `options`: keyword arguments that most algorithms share.
* `row_optimizer`: optimizer types and drivers.
* `learning_rates`: rates, and values that change between steps. `averages`: moving
  averages.
* `resolve`: how the layer applies an optimizer. `probe` runs it on a few rows, with
  operations that `jaxprs` evaluates.
* `table_rows`: totals for a rule. `array_rules`: applies a rule to pytrees of arrays.
* `checks`: checks arguments, and makes equal calls return the same rule.
* `keras`: translates Keras optimizers and schedules.
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
