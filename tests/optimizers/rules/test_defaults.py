"""Default arguments of every optimizer: those of TensorFlow, Keras and FBGEMM."""

import inspect

import pytest

from tpu_embedding import optimizers
from tpu_embedding.optimizers.options import OPTIMIZERS, CommonOptions

ADAM = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
OPTAX_ADAM = {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
MOMENTS = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
ADAGRAD_MOMENTUM = {
    "momentum": 0.0,
    "use_nesterov": False,
    "exponent": 2,
    "beta2": 1,
    "epsilon": 1e-10,
}
ROWWISE_ADAGRAD = {
    "initial_accumulator_value": 0.1,
    "epsilon": 0.0,
    "weight_decay": 0.0,
    "weight_decay_mode": "l2",
}
DEFAULTS = {
    optimizers.sgd: {"learning_rate": 0.01},
    optimizers.momentum: {
        "learning_rate": 0.001,
        "momentum": 0.9,
        "use_nesterov": False,
    },
    optimizers.adagrad: {
        "learning_rate": 0.001,
        "initial_accumulator_value": 0.1,
        "epsilon": 0.0,
    },
    optimizers.rowwise_adagrad: {"learning_rate": 0.001, **ROWWISE_ADAGRAD},
    optimizers.adagrad_momentum: {"learning_rate": 0.001, **ADAGRAD_MOMENTUM},
    optimizers.adam: {
        "learning_rate": 0.001,
        **ADAM,
        "lazy_adam": True,
        "sum_inside_sqrt": True,
        "bias_correction": False,
    },
    optimizers.lazy_adam: {**OPTAX_ADAM, "skipped_steps": "ignore"},
    optimizers.adamw: {**OPTAX_ADAM, "weight_decay": 1e-4},
    optimizers.bounded_adagrad: {
        "learning_rate": 0.001,
        "initial_accumulator_value": 0.1,
        "update_accumulator_first": False,
        "max_var_update": 0.0,
        "max_accumulator": 0.0,
    },
    optimizers.clippy_adagrad: {
        "learning_rate": 0.001,
        "initial_accumulator_value": 0.1,
        "variable_relative_threshold": 0.1,
        "accumulator_relative_threshold": 0.0,
        "absolute_threshold": 1e-7,
        "epsilon": 1e-7,
        "use_standard_accumulator_update": False,
        "clip_accumulator_update": False,
    },
    optimizers.frequency_aware_adagrad: {
        "learning_rate": 0.01,
        "initial_accumulator_value": 0.1,
        "probability_exponent": 0.5,
        "max_lr_multiplier": 1e6,
        "l1": 0.0,
        "l2": 0.0,
        "accumulator_decay": 1.0,
    },
    optimizers.frequency_estimator: {"weight_exponent": 1.0},
    optimizers.frequency_weights: {"weight_exponent": 1.0},
    optimizers.ftrl: {
        "learning_rate": 0.001,
        "learning_rate_power": -0.5,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "beta": 0.0,
        "initial_accumulator_value": 0.1,
        "multiply_linear_by_learning_rate": False,
        "allow_zero_accumulator": False,
        "l2_shrinkage_regularization_strength": 0.0,
    },
    optimizers.lion: {"learning_rate": 0.001, "beta_1": 0.9, "beta_2": 0.99},
    optimizers.proximal_adagrad: {
        "learning_rate": 0.001,
        "l1": 0.0,
        "l2": 0.0,
        "initial_accumulator_value": 0.1,
    },
    optimizers.rmsprop: {
        "learning_rate": 0.001,
        "rho": 0.9,
        "momentum": 0.0,
        "epsilon": 1e-7,
        "initial_ms": 0.0,
        "centered": False,
    },
    optimizers.adadelta: {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-7},
    optimizers.partial_rowwise_adam: {**MOMENTS, "weight_decay": 0.0},
    optimizers.lamb: {**MOMENTS, "weight_decay": 0.0},
    optimizers.partial_rowwise_lamb: {**MOMENTS, "weight_decay": 0.0},
    optimizers.rowwise_rmsprop: {
        "learning_rate": 0.001,
        "rho": 0.9,
        "epsilon": 1e-7,
    },
    optimizers.proximal_yogi: {
        "learning_rate": 0.01,
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-3,
        "l1": 0.0,
        "l2": 0.0,
        "initial_accumulator_value": 1e-6,
    },
    optimizers.online_yogi: {
        "learning_rate": 0.01,
        "l1": 0.0,
        "l2": 0.0,
        "beta_2": 0.999,
    },
    optimizers.user_defined: {
        "slot_names": (),
        "slot_initializers": (),
        "hyperparameters": (),
        "slot_dims": None,
    },
    optimizers.adafactor: {
        "learning_rate": 0.001,
        "beta_2_decay": -0.8,
        "epsilon_1": 1e-30,
        "epsilon_2": 1e-3,
        "clip_threshold": 1.0,
        "relative_step": True,
        "weight_decay": None,
        "clipnorm": None,
        "clipvalue": None,
        "global_clipnorm": None,
        "use_ema": False,
        "ema_momentum": 0.99,
        "ema_overwrite_frequency": None,
        "loss_scale_factor": None,
        "gradient_accumulation_steps": None,
        "name": "adafactor",
        "mode": "lazy",
        "ema_start": "first_update",
        "clipnorm_of": "sum",
    },
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda x: x.__name__)
def test_defaults(function):
    expected = DEFAULTS[function]
    # Calls must give the rate; a name alone takes the default.
    rates = getattr(OPTIMIZERS.get(function.__name__), "args", ())
    found = dict(zip(["learning_rate"], rates, strict=False)) | {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
        and (name in expected or name not in CommonOptions.__annotations__)
    }
    assert found == expected
    # In the order of the positional arguments, too.
    assert list(found) == list(expected)
