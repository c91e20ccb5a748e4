"""Optimizers of embedding tables: optax transformations that treat each row for itself.

A rule is given to a table or to the layer: `optimizer=te.optimizers.adagrad(0.1)`, or
any optax transformation, or the name of a rule of this package with its defaults,
`optimizer="adagrad"`.

In the list, w is a row, g the sum of the gradients of its ids in the step, lr the
learning rate, D the dim, t the step from 1. The bytes are those of the slot variables,
per row; without a remark, a slot is `[rows, D]`, float32, and a row that is not looked
up keeps row and slots. "TF" is TensorFlow's TPU embedding, its class in
`tf.tpu.experimental.embedding` or the message `...Parameters` of its protocol buffer.

* `sgd`, 0 bytes: `w -= lr * g`.
  TF, Keras `SGD`; `optax.sgd`; FBGEMM `EXACT_SGD`. Equal to the dense rule.
* `momentum`, 4 D bytes: `m = momentum * m + g; w -= lr * m`. Slot m.
  TF `Momentum`; `optax.sgd(momentum=)`. Keras' SGD with momentum moves every row.
* `adagrad`, 4 D bytes: `a += g**2; w -= lr * g / sqrt(a + epsilon)`. Slot a.
  TF, Keras `Adagrad`; `optax.adagrad`; FBGEMM `EXACT_ADAGRAD`. TF has no epsilon,
  FBGEMM's is outside the root. Equal to the dense rule.
* `rowwise_adagrad`, 4 bytes: `a += mean(g**2); w -= lr * g / (sqrt(a) + epsilon)`, with
  weight decay "l2" or "decoupled". Slot a `[rows]`.
  FBGEMM, TorchRec `EXACT_ROWWISE_ADAGRAD`, where a starts at 0, here at 0.1; 0 needs an
  epsilon. Equal to the dense rule without weight decay.
* `adagrad_momentum`, 8 D bytes: `a += g**2; m = momentum * m + g / sqrt(a + epsilon);
  w -= lr * m`; the exponent and a decay of a can be chosen. Slots a, m.
  TF `AdagradMomentum`.
* `bounded_adagrad`, 4 D bytes: `a' = min(a + g**2, max_accumulator);
  w -= clip(lr * g / sqrt(a or a'), max_var_update)`. Slot a.
  TF `BoundedAdagrad`, a reading of its text; a bound of 0 is none.
* `proximal_adagrad`, 4 D bytes: `adagrad`, then w shrinks by `lr / sqrt(a) * l1` and is
  divided by `1 + lr / sqrt(a) * l2`. Slot a.
  TF `ProximalAdagrad`.
* `frequency_aware_adagrad`, 4 D + 4 bytes: `c += 1; a = max(decay * a + g**2, start);
  k = min((t / c)**p, max); w -= lr * (k * g / sqrt(a) + l1 * sign(w) + l2 * w)`. Slots
  a, and c `[rows]`, int32.
  TF `FrequencyAwareAdagrad`; jax-tpu-embedding F2A. One counter per row.
* `clippy_adagrad`, 4 D bytes: `adagrad` whose step of a table is scaled down until no
  element changes by more than a share of itself. Slot a.
  TensorFlow Recommenders `ClippyAdagrad`. Asks for a total; equal to the dense rule.
* `adam`, 8 D bytes: `w -= lr * m / sqrt(v + epsilon**2)`, m and v moving averages of g
  and `g**2`. Slots m, v.
  TF `Adam`, lazy, or of every row with `lazy_adam=False`. No bias correction unless
  asked for; Keras' Adam, `optax.adam` and, but for epsilon, FBGEMM `ADAM` are
  `sum_inside_sqrt=False, bias_correction=True`.
* `partial_rowwise_adam`, 4 D + 4 bytes: Adam with bias correction and decoupled weight
  decay, v of `mean(g**2)`. Slots m, and v `[rows]`.
  FBGEMM `PARTIAL_ROWWISE_ADAM`.
* `lamb`, 8 D bytes: u is Adam's step with weight decay; `w -= lr * |w| / |u| * u`,
  with the norms of the row. Slots m, v.
  FBGEMM `LAMB`; `optax.lamb` takes norms of the whole table. The ratio is 1 where a
  norm is 0; FBGEMM has a stuck row or NaN there.
* `partial_rowwise_lamb`, 4 D + 4 bytes: `lamb` with v of `mean(g**2)`. Slots m, and v
  `[rows]`.
  FBGEMM `PARTIAL_ROWWISE_LAMB`.
* `lion`, 4 D bytes: `w -= lr * sign(b1 * m + (1 - b1) * g)`, m a moving average of g.
  Slot m.
  TF, Keras `Lion`; `optax.lion` adds weight decay.
* `rmsprop`, 8 D bytes: `b = momentum * b + lr * g / sqrt(s + epsilon); w -= b`, s a
  moving average of `g**2`. Slots s, b; if centered, also the mean of g: 12 D bytes.
  TF `RmsProp`, `CenteredRmsProp`; Keras `RMSprop`; `optax.rmsprop`.
* `rowwise_rmsprop`, 4 bytes: `w -= lr * g / sqrt(s + epsilon)`, s a moving average of
  `mean(g**2)`. Slot s `[rows]`.
  FBGEMM `rowwise_rmsprop_ar` with `ar_alpha=0`, whose epsilon is outside the root.
* `adadelta`, 8 D bytes: `x = g * sqrt(u + epsilon) / sqrt(a + epsilon); w -= lr * x`, a
  and u moving averages of `g**2` and `x**2`. Slots a, u.
  TF, Keras `Adadelta`; `optax.adadelta`.
* `ftrl`, 8 D bytes: `a' = a + g**2; l += g - (sqrt(a') - sqrt(a)) * w / lr;
  w = (clip(l, l1) - l) / ((sqrt(a') + beta) / lr + 2 * l2)`. Slots a, l.
  TF `FTRL`, Keras `Ftrl`. The first update of a row forgets its initial value.
* `proximal_yogi`, 8 D bytes: `v -= (1 - b2) * sign(v - g**2) * g**2`, m a moving
  average of g, `eta = lr / (sqrt(v) + epsilon)`; `w - eta * m` shrinks by `eta * l1`
  and is divided by `1 + eta * l2`. Slots v, m.
  TF `ProximalYogi`; `optax.yogi` has bias correction, this has not.
* `online_yogi`, 8 D bytes: `ftrl` with the root of Yogi's v for `sqrt(a)`. Slots v, l.
  TF `OnlineYogi`, a reading of its text. The learning rate must not be 0.
* `adafactor`, 8 bytes: `u = g / sqrt(r * c / mean(c))`, clipped and scaled; r and c are
  moving averages of `g**2` over rows and columns. Slots r and a clock `[rows]`; c is
  per table.
  Keras `Adafactor`, exactly with `mode="exact"`; `optax.adafactor` is another rule.
  Asks for totals.
* `frequency_estimator`, 4 bytes: the row, of dim 1, becomes the mean number of steps
  between two of its lookups. Slot: the step of the last, `[rows]`, int32.
  TF `FrequencyEstimator`; `frequency_weights` turns its rows into weights.
* `assign`, 0 bytes: `w = g`. TF `Assign`.
* `user_defined`: a function of one row; 4 D or 4 bytes per slot.
  TF `CustomOptimizer`, but the function may see the whole row.
* `mdl_adagrad_light`: raises; TF `MdlAdagradLight`, whose formula is not public.

**Touched rows or every row.** A layer applies a rule to the touched rows only (lazy):
moments decay when their row is looked up. `every_row` applies it to all, as dense
optimizers do, at the cost of a pass over the table in each step; it can also collect
the gradients of several steps. `in_sequence` applies it once per occurrence of an id.

**Which optax transformations.** All that are row-local: `check_row_local` reads the
transformation's jaxpr and raises `NotRowLocalError`. Sums over rows of the gradient, as
in `optax.clip_by_global_norm` and `optax.apply_if_finite`, become totals over the
table; a rule of your own asks for totals by `table_rows`. `TableOptimizer` is the type
of what a table takes, `RowOptimizer` of what the layer makes of it.

**Options.** Every rule of this package but the last five above takes `with_options`'
arguments, which TensorFlow has on all: bounds of gradients and rows, weight decay,
initial values and type of slots. For other rules there are `with_options` itself and
its pieces `clip_gradients`, `decay_rows`, `clip_rows` and `with_slot_storage`, which
keeps slots in bfloat16, say. Pieces of rules for `optax.chain` are `scale_by_adagrad`,
`scale_by_rowwise_adagrad`, `scale_by_adagrad_momentum` and `scale_by_lazy_adam`.

**Keras.** `from_keras_config(optimizer.get_config())` translates an optimizer of
Keras 3 or `tf_keras`, or says which field has no equivalent and why.

**Learning rates** are numbers or schedules of the step. To change one between steps
without compiling again, `optax.inject_hyperparams(adagrad)(learning_rate=0.1)` keeps it
in the state, and `with_hyperparameters` replaces it there.
"""

from tpu_embedding.optimizers.analysis.row_local import (
    NotRowLocalError as NotRowLocalError,
)
from tpu_embedding.optimizers.analysis.row_local import (
    check_row_local as check_row_local,
)
from tpu_embedding.optimizers.hyperparameters import (
    with_hyperparameters as with_hyperparameters,
)
from tpu_embedding.optimizers.keras.config import from_keras_config as from_keras_config
from tpu_embedding.optimizers.modes import every_row as every_row
from tpu_embedding.optimizers.modes import in_sequence as in_sequence
from tpu_embedding.optimizers.options import clip_gradients as clip_gradients
from tpu_embedding.optimizers.options import clip_rows as clip_rows
from tpu_embedding.optimizers.options import decay_rows as decay_rows
from tpu_embedding.optimizers.options import with_options as with_options
from tpu_embedding.optimizers.row_optimizer import RowOptimizer as RowOptimizer
from tpu_embedding.optimizers.row_optimizer import TableOptimizer as TableOptimizer
from tpu_embedding.optimizers.rules.adafactor import adafactor as adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad as adagrad
from tpu_embedding.optimizers.rules.adagrad import adagrad_momentum as adagrad_momentum
from tpu_embedding.optimizers.rules.adagrad import rowwise_adagrad as rowwise_adagrad
from tpu_embedding.optimizers.rules.adagrad import scale_by_adagrad as scale_by_adagrad
from tpu_embedding.optimizers.rules.adagrad import (
    scale_by_adagrad_momentum as scale_by_adagrad_momentum,
)
from tpu_embedding.optimizers.rules.adagrad import (
    scale_by_rowwise_adagrad as scale_by_rowwise_adagrad,
)
from tpu_embedding.optimizers.rules.adam import adam as adam
from tpu_embedding.optimizers.rules.adam import scale_by_lazy_adam as scale_by_lazy_adam
from tpu_embedding.optimizers.rules.assign import assign as assign
from tpu_embedding.optimizers.rules.bounded_adagrad import (
    bounded_adagrad as bounded_adagrad,
)
from tpu_embedding.optimizers.rules.clippy import clippy_adagrad as clippy_adagrad
from tpu_embedding.optimizers.rules.frequency import (
    frequency_aware_adagrad as frequency_aware_adagrad,
)
from tpu_embedding.optimizers.rules.frequency import (
    frequency_estimator as frequency_estimator,
)
from tpu_embedding.optimizers.rules.frequency import (
    frequency_weights as frequency_weights,
)
from tpu_embedding.optimizers.rules.ftrl import ftrl as ftrl
from tpu_embedding.optimizers.rules.lion import lion as lion
from tpu_embedding.optimizers.rules.momentum import momentum as momentum
from tpu_embedding.optimizers.rules.proximal import proximal_adagrad as proximal_adagrad
from tpu_embedding.optimizers.rules.refused import (
    mdl_adagrad_light as mdl_adagrad_light,
)
from tpu_embedding.optimizers.rules.rmsprop import adadelta as adadelta
from tpu_embedding.optimizers.rules.rmsprop import rmsprop as rmsprop
from tpu_embedding.optimizers.rules.rowwise import lamb as lamb
from tpu_embedding.optimizers.rules.rowwise import (
    partial_rowwise_adam as partial_rowwise_adam,
)
from tpu_embedding.optimizers.rules.rowwise import (
    partial_rowwise_lamb as partial_rowwise_lamb,
)
from tpu_embedding.optimizers.rules.rowwise import rowwise_rmsprop as rowwise_rmsprop
from tpu_embedding.optimizers.rules.sgd import sgd as sgd
from tpu_embedding.optimizers.rules.user_defined import user_defined as user_defined
from tpu_embedding.optimizers.rules.yogi import online_yogi as online_yogi
from tpu_embedding.optimizers.rules.yogi import proximal_yogi as proximal_yogi
from tpu_embedding.optimizers.slot_storage import with_slot_storage as with_slot_storage
from tpu_embedding.optimizers.table_rows import table_rows as table_rows
