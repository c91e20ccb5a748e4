"""Totals over parts: found in order, each from the ones before, and reduced once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.update.update_cases import plan_of, sharded
from tpu_embedding.update.totals import across_shards, find_totals, known_totals


def rule(values, all_reduce):
    """Asks for a sum, a minimum of what is above half of it, and a sum of both."""
    total = all_reduce(jnp.sum(values), "sum")
    above = jnp.where(values > total / 2, values, 100.0)
    least = all_reduce(jnp.min(above), "min")
    return all_reduce(jnp.sum(values * least) + total, "sum")


def expected_totals(parts):
    total = sum(np.sum(part) for part in parts)
    values = np.concatenate(parts)
    above = values[values > total / 2]
    least = above.min() if above.size else 100.0
    return [total, least, np.sum(values * least) + len(parts) * total]


PARTS = {
    "one": [[3.0, 1.0]],
    "two": [[1.0, -9.0], [2.0]],
    "least_in_the_middle": [[7.0], [-2.0, -30.0], [4.0, 5.0]],
    "an_empty_part": [[1.0], [], [3.0, -1.0]],
}


def fold_over(parts, runs=None):
    def fold_rest(fold, carry):
        for part in parts:
            carry = fold(carry, lambda all_reduce, part=part: runs_of(part, all_reduce))
        return carry

    def runs_of(part, all_reduce):
        if runs is not None:
            runs.append(part)
        return rule(part, all_reduce)

    return fold_rest


@pytest.mark.parametrize("name", PARTS)
def test_totals_of_parts_are_those_of_the_whole(name):
    parts = [np.append(np.float32(part), np.float32(50)) for part in PARTS[name]]
    asked = []

    def all_reduce(totals, reduction):
        asked.append(reduction)
        return totals

    known = find_totals(
        lambda all_reduce: rule(parts[0], all_reduce), fold_over(parts[1:]), all_reduce
    )
    np.testing.assert_array_equal(known, expected_totals(parts))
    assert asked == ["sum", "min", "sum"]
    # With the totals, the rule runs on each part as it would on all.
    for part in parts:
        assert rule(part, known_totals(known)) == known[-1]


def test_runs_each_part_once_per_total():
    first, rest = np.float32([1]), [np.float32([2]), np.float32([3])]
    runs = []
    known = find_totals(
        lambda all_reduce: rule(first, all_reduce),
        fold_over(rest, runs),
        lambda totals, _: totals,
    )
    assert len(known) == 3
    assert len(runs) == 3 * len(rest)


def test_reduced_totals_reach_the_next_request():
    """Two equal shards: each total is twice that of one, and so is the next."""
    reduce_two = {"sum": lambda x: 2 * x, "min": lambda x: x}
    known = find_totals(
        lambda all_reduce: all_reduce(all_reduce(jnp.float32(3), "sum") + 1, "sum"),
        lambda fold, carry: carry,
        lambda totals, reduction: reduce_two[reduction](totals),
    )
    assert [float(total) for total in known] == [6, 14]


def test_a_rule_without_totals_has_none():
    def refuse(*_):
        raise AssertionError("Nothing is to be reduced or folded.")

    assert find_totals(lambda all_reduce: None, refuse, refuse) == []


def test_an_error_of_the_rule_is_raised():
    def fail(all_reduce):
        all_reduce(jnp.zeros(()), "sum")
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        find_totals(fail, lambda fold, carry: carry, lambda totals, _: totals)


def test_known_totals_answer_in_order():
    answer = known_totals([jnp.float32(5), jnp.float32(6)])
    assert [float(answer(jnp.zeros(()), kind)) for kind in ("min", "sum")] == [5, 6]
    with pytest.raises(StopIteration):
        answer(jnp.zeros(()), "sum")


def test_all_reduce_over_the_shards():
    plan, _ = plan_of([9], 2, "sgd", num_devices=3)
    all_reduce = across_shards(plan.stacks[0], plan)
    values = [np.float32([1, -5]), np.float32([2, 7]), np.float32([-4, 8])]
    results = sharded(plan, lambda x: (all_reduce(x, "sum"), all_reduce(x, "min")))(
        values
    )
    for total, least in results:
        np.testing.assert_array_equal(total, [-1, 10])
        np.testing.assert_array_equal(least, [-4, -5])


def test_totals_within_a_loop():
    """Later parts may be those of a `fori_loop`."""
    parts = jnp.asarray([[50.0, 2], [9, -3], [60, 4]])

    def fold_rest(fold, carry):
        return jax.lax.fori_loop(
            1, 3, lambda i, carry: fold(carry, lambda a: rule(parts[i], a)), carry
        )

    known = find_totals(
        lambda all_reduce: rule(parts[0], all_reduce),
        fold_rest,
        lambda totals, _: totals,
    )
    np.testing.assert_array_equal(known, expected_totals(np.asarray(parts)))
