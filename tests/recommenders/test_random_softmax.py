"""Random programs of the softmax losses, equal to their definition in float64.

Many items of these programs have equal vectors. Such items must have equal scores: a
model with one vector for all items would otherwise get a recall that it doesn't have.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of

PROGRAMS = {"some": [0, 3], "all": range(300)}
SIZES = [1, 2, 3, 7, 8, 13, 16, 24, 40, 64, 65, 128, 250, 256]
KINDS = ["collapsed", "duplicated", "integers", "zeros", "normal"]
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
K = 10


def random_vectors(generator, kind, size, dim):
    """Returns `[size, dim]`. Scores of integers are exact, also in bfloat16."""
    match kind:
        case "collapsed":
            return np.tile(generator.normal(size=(1, dim)), (size, 1))
        case "duplicated":
            distinct = generator.normal(size=(max(1, size // 8), dim))
            return distinct[generator.integers(0, len(distinct), size)]
        case "integers":
            return generator.integers(-1, 2, (size, dim))
        case "zeros":  # of either sign
            return np.copysign(0.0, generator.normal(size=(size, dim)))
        case _:
            return generator.normal(size=(size, dim))


@dataclasses.dataclass(frozen=True)
class Program:
    """A call of a loss. Without negatives, it is `in_batch_softmax`."""

    arrays: list[jax.Array]
    options: dict
    is_jitted: bool
    log_qs: list[np.ndarray]
    is_negative: np.ndarray
    weights: np.ndarray

    def loss(self, *arrays):
        is_sampled = len(arrays) == 3
        loss = te.nn.sampled_softmax if is_sampled else te.nn.in_batch_softmax
        return loss(*arrays, **self.options)

    def run(self):
        run = jax.jit(self.loss) if self.is_jitted else self.loss
        return run(*self.arrays)


def random_program(seed):
    generator = np.random.default_rng(seed)
    batch, num_negatives = generator.choice(SIZES, 2)
    dim, num_devices = generator.integers(1, 257), generator.choice([1, 1, 3, 8])
    dtype = str(generator.choice(["float32", "float32", "bfloat16"]))
    kind = str(generator.choice(KINDS))
    is_sampled, is_jitted, by_ids, by_log_q, one_log_q = generator.random(5) < 0.5
    num_items = batch + num_negatives
    vectors = random_vectors(generator, kind, num_items, dim)
    kind = "integers" if kind == "integers" else "normal"
    queries = random_vectors(generator, kind, batch, dim)
    ids = generator.integers(0, 2 * num_items, num_items).astype(np.int32)
    # A few values, so that equal vectors have equal or different ones.
    log_q = generator.choice([-1.25] if one_log_q else [-0.5, -3.0], num_items)
    log_q = log_q if by_log_q else np.zeros(num_items)
    mesh = mesh_of(num_devices)

    def put(array, dtype=dtype):
        spec = PartitionSpec("shard" if len(array) % num_devices == 0 else None)
        return jax.device_put(jnp.asarray(array, dtype), NamedSharding(mesh, spec))

    arrays, options = [put(queries), put(vectors[:batch])], {}
    candidates = slice(batch, None) if is_sampled else slice(batch)
    if is_sampled:
        arrays.append(put(vectors[candidates]))
        if by_log_q:
            options["item_log_probabilities"] = put(log_q[:batch])
            options["negative_log_probabilities"] = put(log_q[candidates])
    elif by_log_q:
        options["log_probabilities"] = put(log_q[:batch])
    is_negative = np.ones((batch, len(ids[candidates])), bool)
    if by_ids:
        options["item_ids"] = ids[:batch]
        if is_sampled:
            options["negative_ids"] = put(ids[candidates], np.int32)
        is_negative = ids[:batch, None] != ids[candidates]
    if not is_sampled:
        is_negative &= ~np.eye(batch, dtype=bool)
    return Program(
        arrays=arrays,
        options=options,
        is_jitted=bool(is_jitted),
        log_qs=[log_q[:batch], log_q[candidates]],
        is_negative=is_negative,
        weights=generator.integers(0, 3, batch),
    )


def check_program(program):
    arrays = [np.asarray(x, np.float64) for x in program.arrays]
    queries, items, others = arrays[0], arrays[1], arrays[-1]
    own_log_q, log_q = program.log_qs
    own = np.sum(queries * items, axis=1) - own_log_q
    scores = queries @ others.T - log_q
    # Bounds of the rounding of float32 sums in any order, of the product, and of the
    # difference.
    dtype = program.arrays[0].dtype.name
    rounding = queries.shape[1] * EPSILON["float32"] + 2 * EPSILON[dtype]
    sizes = np.abs(queries) @ np.abs(others).T + np.abs(log_q)
    own_sizes = np.sum(np.abs(queries * items), axis=1) + np.abs(own_log_q)
    errors = rounding * (sizes + own_sizes[:, None])
    if np.all(queries == np.round(queries)) and not np.any(log_q):
        errors[:] = 0

    # Pairs of equal vectors are compared by log q, and others by scores, unless these
    # are so close that rounding decides.
    is_same = np.all(items[:, None, :] == others[None, :, :], axis=2)
    left = np.where(is_same, own_log_q[:, None], scores)
    right = np.where(is_same, log_q, own[:, None])
    is_close = ~is_same & (np.abs(left - right) <= errors) & (errors > 0)
    is_known = program.is_negative & ~is_close
    higher = np.sum(is_known & (left > right), axis=1)
    equal = np.sum(is_known & (left == right), axis=1) + 1
    num_close = np.sum(program.is_negative & is_close, axis=1)
    log_softmax, ranks = program.run()
    more_higher = np.asarray(ranks.num_higher) - higher
    more_equal = np.asarray(ranks.num_equal) - equal
    assert np.all(more_higher >= 0) and np.all(more_equal >= 0)
    assert np.all(more_higher + more_equal <= num_close)
    weights = np.where(num_close == 0, program.weights, 0)
    if np.any(weights):
        recall = te.metrics.RecallAtK.from_ranks(ranks, weights, k=K).compute()
        wanted = np.average(np.clip((K - higher) / equal, 0, 1), weights=weights)
        # float32 rounding of the share and its mean
        assert float(recall) == pytest.approx(wanted, rel=1e-6, abs=1e-7)

    scores = np.where(program.is_negative, scores, -np.inf)
    scores = np.concatenate([own[:, None], scores], axis=1)
    chosen = np.exp(scores - scores.max(axis=1, keepdims=True))
    chosen /= chosen.sum(axis=1, keepdims=True)
    wanted = np.log(chosen[:, 0] + 1e-300)
    errors = np.max(errors, axis=1, initial=0) + 4 * EPSILON[dtype] * (
        1 + np.abs(scores[:, 0]) + np.abs(wanted)
    )
    assert np.all(np.abs(np.asarray(log_softmax, np.float64) - wanted) <= 2 * errors)
    total = lambda arrays: jnp.sum(program.loss(*arrays)[0].astype(jnp.float32))  # noqa: E731
    gradients = jax.jit(jax.grad(total))(program.arrays)
    own_share, shares = 1 - chosen[:, :1], chosen[:, 1:]
    errors = 4 * errors[:, None]  # of each share, relative
    # (gradient, bound of its rounding error) of queries, items and others
    of_queries = own_share * items - shares @ others
    of_items, of_others = own_share * queries, -shares.T @ queries
    bounds = [
        errors * (np.abs(items) + shares @ np.abs(others)),
        errors * np.abs(queries),
        shares.T @ (errors * np.abs(queries)),
    ]
    wanted = [of_queries, of_items, of_others]
    if len(arrays) == 2:
        wanted = [of_queries, of_items + of_others]
        bounds = [bounds[0], bounds[1] + bounds[2]]
    for gradient, expected, bound in zip(gradients, wanted, bounds, strict=True):
        difference = np.abs(np.asarray(gradient, np.float64) - expected)
        assert np.all(difference <= bound + 1e-30)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(PROGRAMS["some"], marks=pytest.mark.full(every_case=True)),
        pytest.param(PROGRAMS["all"], marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_random_programs_equal_their_definition(seeds):
    for seed in seeds:
        try:
            check_program(random_program(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        if seed % 50 == 49:
            jax.clear_caches()
