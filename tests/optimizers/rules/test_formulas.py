"""Rules for three steps on `[4, 3]` rows, against their equations in float64.

`test_golden` has the rules whose numbers recorded runs show. All options differ
from their defaults and from each other, so each number and operator of a rule shows.
The learning rate rises with the step. Adafactor has a file of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding import optimizers as opt
from tpu_embedding.optimizers.rules.rowwise import scale_by_row_trust_ratio

ROWS = np.float32(
    [[0.5, -1.5, 2.0], [-0.25, 0.75, 0.125], [0.0, 3.0, -0.5], [1.0, -0.01, -2.5]]
)
GRADIENTS = np.float32(
    [
        [[0.5, -0.25, 3.0], [-1.0, 0.1, 0.2], [0.3, 0.0, -0.7], [2.0, -2.0, 0.05]],
        [[-0.4, 0.6, 0.01], [0.9, -0.2, 1.5], [0.0, 1.1, 0.25], [-0.3, 0.8, -4.0]],
        [[0.2, 0.3, -0.6], [0.05, 2.5, -0.1], [-1.2, 0.4, 0.6], [0.7, 0.0, 0.9]],
    ]
)
ZEROS, ROW_ZEROS = np.zeros((4, 3)), np.zeros(4)


def schedule(count):
    return 0.1 + 0.05 * count


def rate(t):
    """The learning rate of step t, counted from 1."""
    return 0.1 + 0.05 * (t - 1)


def row_mean(values):
    return values.mean(axis=1)


def adagrad(w, g, slots, t):
    a = slots[0] + g**2
    return w - rate(t) * g / np.sqrt(a + 0.05), [a]


def rowwise_adagrad(decay, mode):
    def step(w, g, slots, t):
        g = g + decay * w if mode == "l2" else g
        a = slots[0] + row_mean(g**2)
        new = w - rate(t) * g / (np.sqrt(a) + 0.05)[:, None]
        return new - rate(t) * decay * w if mode == "decoupled" else new, [a]

    return step


def adam(inside, corrects):
    def step(w, g, slots, t):
        m = 0.8 * slots[0] + 0.2 * g
        v = 0.95 * slots[1] + 0.05 * g**2
        c = np.sqrt(1 - 0.95**t) / (1 - 0.8**t) if corrects else 1
        root = np.sqrt(v + 0.3**2) if inside else np.sqrt(v) + 0.3
        return w - c * rate(t) * m / root, [m, v]

    return step


def bounded_adagrad(first, max_update, max_accumulator):
    def step(w, g, slots, t):
        a = np.minimum(slots[0] + g**2, max_accumulator)
        s = rate(t) * g / np.sqrt(a if first else slots[0])
        return w - np.clip(s, -max_update, max_update), [a]

    return step


def clippy(relative, accumulator_relative, absolute, standard=False, clips=False):
    def step(w, g, slots, t):
        a = slots[0] + g**2 if standard else slots[0]
        p = 1 / np.sqrt(a + 0.05)
        d = rate(t) * g * p
        bound = np.abs(w) * relative + p * accumulator_relative + absolute
        scale = min(1, (bound[d != 0] / np.abs(d[d != 0])).min())
        if not standard:
            a = a + (scale * g if clips else g) ** 2
        return w - scale * d, [a]

    return step


def proximal(z, eta):
    l1, l2 = 0.3, 0.4
    return np.sign(z) * np.maximum(np.abs(z) - eta * l1, 0) / (1 + eta * l2)


def yogi_velocity(v, g):
    return v - 0.3 * np.sign(v - g**2) * g**2


def proximal_yogi(w, g, slots, t):
    v = yogi_velocity(slots[0], g)
    m = 0.8 * slots[1] + 0.2 * g
    eta = rate(t) / (np.sqrt(v) + 0.05)
    return proximal(w - eta * m, eta), [v, m]


def online_yogi(w, g, slots, t):
    v, linear = slots
    new = yogi_velocity(v, g)
    linear = linear + g - (np.sqrt(new) - np.sqrt(v)) * w / rate(t)
    numerator = np.clip(linear, -0.3, 0.3) - linear
    return numerator / (np.sqrt(new) / rate(t) + 2 * 0.4), [new, linear]


def moments(mean, scales):
    """Adam with bias correction, and LAMB, with one velocity per element or row."""

    def step(w, g, slots, t):
        m = 0.8 * slots[0] + 0.2 * g
        v = 0.95 * slots[1] + 0.05 * mean(g**2)
        root = np.sqrt(v / (1 - 0.95**t)) + 0.05
        u = m / (1 - 0.8**t) / (root if v.ndim == 2 else root[:, None]) + 0.3 * w
        if scales:
            u *= (np.linalg.norm(w, axis=1) / np.linalg.norm(u, axis=1))[:, None]
        return w - rate(t) * u, [m, v]

    return step


def rowwise_rmsprop(w, g, slots, t):
    ms = 0.7 * slots[0] + 0.3 * row_mean(g**2)
    return w - rate(t) * g / np.sqrt(ms + 0.05)[:, None], [ms]


def row_rule(gradient, embedding_table, slot_variables, learning_rate, hyperparameters):
    total, level = slot_variables
    decay, gain = hyperparameters
    total = decay * total + gradient
    level = level + jnp.sum(gradient)
    return embedding_table - learning_rate * gain * total, total, level


def user_defined(w, g, slots, t):
    total = 0.5 * slots[0] + g
    return w - rate(t) * t * total, [total, slots[1] + g.sum(axis=1)]


def assign(w, g, slots, t):
    return g, []


def frequency_aware(w, g, slots, t):
    """Rows were looked up in 1, 2, 4 and 5 of the 5 steps before."""
    a = np.maximum(0.5 * slots[0] + g**2, 0.3)
    c = slots[1] + 1
    k = np.minimum(((5 + t) / c) ** 0.7, 2.0)[:, None]
    step = k * g / np.sqrt(a) + 0.02 * np.sign(w) + 0.03 * w
    return w - rate(5 + t) * step, [a, c]


ADAM = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 0.3}
MOMENTS = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 0.05, "weight_decay": 0.3}
PROXIMAL = {"l1": 0.3, "l2": 0.4, "initial_accumulator_value": 0.3}

CASES: dict[str, Any] = {
    "adagrad": (opt.adagrad(schedule, 0.3, epsilon=0.05), adagrad, [ZEROS + 0.3]),
    **{
        f"rowwise_adagrad_{mode}_{decay}": (
            opt.rowwise_adagrad(
                *(schedule, 0.3),
                epsilon=0.05,
                weight_decay=decay,
                weight_decay_mode=mode,
            ),
            rowwise_adagrad(decay, mode),
            [ROW_ZEROS + 0.3],
        )
        for mode, decay in [("l2", 0), ("l2", 0.2), ("decoupled", 0.2)]
    },
    "adam": (opt.adam(schedule, **ADAM), adam(True, False), [ZEROS, ZEROS]),
    "adam_outside_corrected": (
        opt.adam(schedule, **ADAM, sum_inside_sqrt=False, bias_correction=True),
        adam(False, True),
        [ZEROS, ZEROS],
    ),
    "bounded_adagrad": (
        opt.bounded_adagrad(schedule, 0.3, False, 0.2, 2.0),
        bounded_adagrad(False, 0.2, 2.0),
        [ZEROS + 0.3],
    ),
    "bounded_adagrad_first_unbounded": (
        opt.bounded_adagrad(schedule, 0.3, True),
        bounded_adagrad(True, np.inf, np.inf),
        [ZEROS + 0.3],
    ),
    **{
        f"clippy_{name}": (
            opt.clippy_adagrad(schedule, 0.3, 0.2, 0.03, bound, 0.05, **flags),
            clippy(0.2, 0.03, bound, **options),
            [ZEROS + 0.3],
        )
        for name, bound, flags, options in [
            ("", 0.04, {}, {}),
            (
                *("standard", 0.04, {"use_standard_accumulator_update": True}),
                {"standard": True},
            ),
            ("clips", 0.04, {"clip_accumulator_update": True}, {"clips": True}),
            ("without_effect", 50.0, {}, {}),
        ]
    },
    "proximal_yogi": (
        opt.proximal_yogi(schedule, 0.8, 0.7, 0.05, **PROXIMAL),
        proximal_yogi,
        [ZEROS + 0.3, ZEROS],
    ),
    "online_yogi": (
        opt.online_yogi(schedule, 0.3, 0.4, 0.7),
        online_yogi,
        [ZEROS, ZEROS],
    ),
    **{
        make.__name__: (
            make(schedule, **MOMENTS),
            moments(mean, scales),
            [ZEROS, mean(ZEROS)],
        )
        for make, mean, scales in [
            (opt.partial_rowwise_adam, row_mean, False),
            (opt.lamb, lambda squares: squares, True),
            (opt.partial_rowwise_lamb, row_mean, True),
        ]
    },
    "rowwise_rmsprop": (
        opt.rowwise_rmsprop(schedule, 0.7, 0.05),
        rowwise_rmsprop,
        [ROW_ZEROS],
    ),
    "user_defined": (
        opt.user_defined(
            row_rule,
            schedule,
            slot_names=("a", "b"),
            slot_initializers=(0.25, jnp.ones),
            hyperparameters=(0.5, lambda count: count + 1),
            slot_dims=(2, 1),
        ),
        user_defined,
        [ZEROS + 0.25, ROW_ZEROS + 1],
    ),
    "assign": (opt.assign(), assign, []),
    "frequency_aware_adagrad": (
        opt.frequency_aware_adagrad(
            schedule, 0.3, 0.7, 2.0, 0.02, 0.03, accumulator_decay=0.5
        ),
        frequency_aware,
        [ZEROS + 0.3, np.array([1.0, 2, 4, 5])],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_follows_the_equation(name):
    optimizer, step, slots = CASES[name]
    rows, expected = jnp.asarray(ROWS), ROWS.astype(np.float64)
    state, start = optimizer.init(rows), 0
    if name == "frequency_aware_adagrad":
        np.testing.assert_array_equal(state.counters, [0, 0, 0, 0])
        start = 5
        state = state._replace(count=jnp.int32(start), counters=jnp.int32(slots[1]))
    check_state(state, slots, start)
    for t, gradients in enumerate(GRADIENTS, 1):
        updates, state = optimizer.update(jnp.asarray(gradients), state, rows)
        assert updates.dtype == jnp.float32
        rows = rows + updates
        expected, slots = step(expected, gradients.astype(np.float64), slots, t)
        # float32 rounds each of some ten operations; sums of near values lose digits.
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=2e-6)
        check_state(state, slots, start + t)


def check_state(state, slots, count):
    """Compares the slot variables, in the order of the state, and all counts."""
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        assert leaf.ndim > 0 or leaf == count
    found = [leaf for leaf in leaves if leaf.ndim > 0]
    assert len(found) == len(slots)
    for leaf, expected in zip(found, slots, strict=True):
        assert leaf.shape == expected.shape
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("multiplies", [False, True])
def test_ftrl_gives_zero_where_the_denominator_is_zero(multiplies):
    optimizer: Any = opt.ftrl(
        0.1,
        initial_accumulator_value=0.0,
        allow_zero_accumulator=True,
        multiply_linear_by_learning_rate=multiplies,
    )
    rows = jnp.asarray([[2.0, 2.0]])
    updates, _ = optimizer.update(jnp.asarray([[0.0, 3.0]]), optimizer.init(rows), rows)
    # l = 3 - 3 * 2 / 0.1 = -57, or 0.3 - 3 * 2 = -5.7; w = -l / (3 / 0.1).
    np.testing.assert_allclose(rows + updates, [[0.0, 1.9]], rtol=1e-5)


def test_trust_ratio_is_one_where_a_norm_is_zero():
    rule = scale_by_row_trust_ratio()
    rows = jnp.asarray([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]])
    steps = jnp.asarray([[0.0, 2.0], [0.5, 1.5], [0.0, 0.0]])
    updates, _ = rule.update(steps, rule.init(rows), rows)
    np.testing.assert_allclose(updates, [[0, 5], [0.5, 1.5], [0, 0]])


def test_clippy_counts_no_element_whose_step_is_zero():
    """Without thresholds any step has the ratio 0, unless it is none."""
    optimizer: Any = opt.clippy_adagrad(1.0, 1.0, 0.5, 0.0, 0.0, 1e-7)
    rows = jnp.asarray([[0.0, 4.0], [0.0, 4.0]])
    gradient = jnp.asarray([[0.0, 4.0], [0.0, 1.0]])
    updates, _ = optimizer.update(gradient, optimizer.init(rows), rows)
    # The bound of 2 halves the step of 4, and with it all other steps.
    np.testing.assert_allclose(updates, [[0, -2], [0, -0.5]], rtol=1e-5)


def test_frequency_estimator_follows_the_equation():
    optimizer: Any = opt.frequency_estimator(0.25, 8.0, outlier_threshold=3.0)
    rows = jnp.asarray([[8.0], [1.0], [2.0], [2.0]])
    state = optimizer.init(rows)
    assert state.last_hit_step.tolist() == [0, 0, 0, 0]
    state = state._replace(count=jnp.int32(11), last_hit_step=jnp.int32([10, 10, 6, 7]))
    updates, state = optimizer.update(jnp.full((4, 1), jnp.nan), state, rows)
    # Intervals are 2, 2, 6 and 5; the third is three times its row.
    expected = [[0.75 * 8 + 0.25 * 2], [0.75 + 0.25 * 2], [6], [0.75 * 2 + 0.25 * 5]]
    np.testing.assert_allclose(rows + updates, expected, rtol=1e-6)
    assert state.count == 12
    assert state.last_hit_step.tolist() == [12, 12, 12, 12]
    state = state._replace(count=jnp.int32(30))
    updates, _ = optimizer.update(rows, state, rows)
    # An interval of 19 counts as 8.
    np.testing.assert_allclose(rows + updates, [[0.75 * 8 + 2], [8], [8], [8]])


def test_frequency_weights_follow_the_equation():
    deltas = jnp.asarray([8.0, 2.0])
    weights = opt.frequency_weights(deltas, 8.0, 0.5)
    np.testing.assert_allclose(weights, [1.0, 0.5])
    np.testing.assert_allclose(opt.frequency_weights(deltas, 8.0), [1.0, 0.25])
    gradient = jax.grad(lambda x: opt.frequency_weights(x, 8.0).sum())(deltas)
    np.testing.assert_array_equal(gradient, [0, 0])
