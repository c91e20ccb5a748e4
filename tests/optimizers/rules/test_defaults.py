"""Default arguments of every optimizer, which TensorFlow, Keras and FBGEMM share."""

import inspect
import re

import pytest

from tpu_embedding import optimizers
from tpu_embedding.optimizers.options import OPTIMIZERS, CommonOptions

DEFAULTS = """
sgd: learning_rate=0.01
momentum: learning_rate=0.001, momentum=0.9, use_nesterov=False
adagrad: learning_rate=0.001, initial_accumulator_value=0.1, epsilon=0.0
rowwise_adagrad: learning_rate=0.001, initial_accumulator_value=0.1, epsilon=0.0,
  weight_decay=0.0, weight_decay_mode='l2'
adagrad_momentum: learning_rate=0.001, momentum=0.0, use_nesterov=False, exponent=2,
  beta2=1, epsilon=1e-10
adam: learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-07, lazy_adam=True,
  sum_inside_sqrt=True, bias_correction=False
lazy_adam: learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-08,
  skipped_steps='ignore'
adamw: learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-08, weight_decay=0.0001
bounded_adagrad: learning_rate=0.001, initial_accumulator_value=0.1,
  update_accumulator_first=False, max_var_update=0.0, max_accumulator=0.0
clippy_adagrad: learning_rate=0.001, initial_accumulator_value=0.1,
  variable_relative_threshold=0.1, accumulator_relative_threshold=0.0,
  absolute_threshold=1e-07, epsilon=1e-07, use_standard_accumulator_update=False,
  clip_accumulator_update=False
frequency_aware_adagrad: learning_rate=0.01, initial_accumulator_value=0.1,
  probability_exponent=0.5, max_lr_multiplier=1000000.0, l1=0.0, l2=0.0,
  accumulator_decay=1.0
frequency_estimator: weight_exponent=1.0
frequency_weights: weight_exponent=1.0
ftrl: learning_rate=0.001, learning_rate_power=-0.5, l1_regularization_strength=0.0,
  l2_regularization_strength=0.0, beta=0.0, initial_accumulator_value=0.1,
  multiply_linear_by_learning_rate=False, allow_zero_accumulator=False,
  l2_shrinkage_regularization_strength=0.0
lion: learning_rate=0.001, beta_1=0.9, beta_2=0.99
proximal_adagrad: learning_rate=0.001, l1=0.0, l2=0.0, initial_accumulator_value=0.1
rmsprop: learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-07, initial_ms=0.0,
  centered=False
adadelta: learning_rate=0.001, rho=0.95, epsilon=1e-07
partial_rowwise_adam: learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-08,
  weight_decay=0.0
lamb: learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-08, weight_decay=0.0
partial_rowwise_lamb: learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-08,
  weight_decay=0.0
rowwise_rmsprop: learning_rate=0.001, rho=0.9, epsilon=1e-07
proximal_yogi: learning_rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=0.001, l1=0.0,
  l2=0.0, initial_accumulator_value=1e-06
online_yogi: learning_rate=0.01, l1=0.0, l2=0.0, beta_2=0.999
user_defined: slot_names=(), slot_initializers=(), hyperparameters=(), slot_dims=None
adafactor: learning_rate=0.001, beta_2_decay=-0.8, epsilon_1=1e-30, epsilon_2=0.001,
  clip_threshold=1.0, relative_step=True, weight_decay=None, clipnorm=None,
  clipvalue=None, global_clipnorm=None, use_ema=False, ema_momentum=0.99,
  ema_overwrite_frequency=None, loss_scale_factor=None,
  gradient_accumulation_steps=None, name='adafactor', mode='lazy',
  ema_start='first_update', clipnorm_of='sum'
"""


@pytest.mark.parametrize("line", re.sub(r"\n  ", " ", DEFAULTS).split("\n")[1:-1])
def test_defaults(line):
    """Also in the order of the positional arguments."""
    name = line.partition(":")[0]
    parameters = inspect.signature(getattr(optimizers, name)).parameters.values()
    # Calls must give the rate; a name alone takes the default.
    rates = getattr(OPTIMIZERS.get(name), "args", ())
    found = [f"learning_rate={rate!r}" for rate in rates]
    for x in parameters:
        is_common = x.name in CommonOptions.__annotations__
        is_own = f" {x.name}=" in line or not is_common
        if x.default is not inspect.Parameter.empty and is_own:
            found.append(f"{x.name}={x.default!r}")
    assert line == f"{name}: {', '.join(found)}"
