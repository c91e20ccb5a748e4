"""Every fix that the error of a mismatch names is tried: it has to work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.checkpoint.test_saving import (
    RULE,
    check_equal,
    numbers_of,
    plan_of,
    state_of,
    with_random_slots,
)
from tests.tiers import full_cases, matrix, quick_cases, with_ids
from tpu_embedding.checkpoint import CheckpointError, differences

RATE = optax.linear_schedule(0.1, 0.0, 100)
OTHER_RULES = {
    "a schedule": (te.optimizers.adagrad(0.1), te.optimizers.adagrad(RATE)),
    "a schedule of a rule that counts": (
        te.optimizers.adam(0.1),
        te.optimizers.adam(RATE),
    ),
    "another rule": (te.optimizers.adagrad(0.1), te.optimizers.adam(0.1)),
    "slots of other shapes": (te.optimizers.adagrad(0.1), optax.adagrad(0.1)),
    "no optimizer now": (te.optimizers.adagrad(0.1), None),
}


@pytest.mark.parametrize(
    ("old", "new", "is_abstract"),
    quick_cases(
        matrix(with_ids(OTHER_RULES), [False, True]),
        "a schedule-False",
        "another rule-True",
        "slots of other shapes-False",
        "no optimizer now-True",
    ),
)
def test_other_rules(tmp_path, old, new, is_abstract):
    plan, other = (plan_of(rules={"movie": rule, "user": RULE}) for rule in (old, new))
    state = trained(plan)
    te.save(tmp_path / "a", state, plan=plan)
    wanted_tables, wanted_slots = numbers_of(state, plan)

    def new_state():
        state = state_of(other, 1)
        if not is_abstract:
            return state
        return jax.eval_shape(lambda: state) | {"step": 0}

    with pytest.raises(CheckpointError) as error:
        te.restore(tmp_path / "a", new_state(), plan=other)
    for way_out in (
        "rules='ignore'",
        "slots='initialize'",
        "with the checkpoint's optimizer",
    ):
        assert way_out in str(error.value)
    fresh = numbers_of(state_of(other, 3), other)[1]
    for options in ({"rules": "ignore"}, {"slots": "initialize"}, {}):
        into, of = (new_state(), other) if options else (state_of(plan, 1), plan)
        restored = te.restore(tmp_path / "a", into, plan=of, **options)
        tables, slots = numbers_of(restored, of)
        check_equal(tables, wanted_tables)
        if options == {"slots": "initialize"}:
            check_equal(slots, fresh)
        for table, name in ((t, n) for t in slots for n in slots[t]):
            saved = wanted_slots.get(table, {})
            if options == {"rules": "ignore"} and name.endswith("count"):
                counts = [x for n, x in saved.items() if n.endswith("count")]
                assert slots[table][name] == (counts or [0])[0]
            elif options == {"rules": "ignore"}:
                expected = saved.get(name, fresh[table][name])
                np.testing.assert_array_equal(slots[table][name], expected)


def trained(plan, count=7):
    state = with_random_slots(state_of(plan), plan)
    counts = {
        table: {name: count for name in names if name.endswith("count")}
        for table, names in te.functional.slot_values(
            state["slots"], plan, "all"
        ).items()
    }
    slots = te.functional.with_slot_values(state["slots"], counts, plan)
    return state | {"slots": slots}


def test_the_count_of_tables_that_stay_is_kept(tmp_path):
    plan = plan_of(rules=te.optimizers.adam(0.1))
    te.save(tmp_path / "a", trained(plan), plan=plan)
    restore = functools.partial(te.restore, tmp_path / "a", plan=plan, tables=["movie"])
    with pytest.raises(CheckpointError, match="'user'.*share 'count' 3.* 7 for"):
        restore(trained(plan, 3))
    wanted = numbers_of(trained(plan, 3), plan)[1]["user"]
    _, slots = numbers_of(restore(trained(plan, 3), slots="initialize"), plan)
    check_equal(slots["user"], wanted)
    assert not slots["movie"]["momenta"].any()


def load_rows(directory, plan):
    rows = te.checkpoint.read_table(directory, "movie", slice(0, 30))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    values = np.array(te.functional.unstack_tables(tables, plan)["movie"])
    values[:30, : rows.shape[1]] = rows[:, : values.shape[1]]
    te.functional.with_table_values(tables, {"movie": values}, plan)


FIXES = {
    "missing": (dict(sizes={"movie": 40, "film": 7}), dict(rename={"film": "user"})),
    "extra": (dict(sizes={"movie": 40}), dict(tables=["movie"])),
    "shape": (dict(sizes={"movie": 39, "user": 7}), load_rows),
    "dtype": (dict(dtypes={"movie": "bfloat16"}), dict(dtypes="convert")),
    "dynamic": (
        dict(sizes={"movie": te.Dynamic(capacity=64), "user": 7}),
        dict(tables=["user"]),
    ),
}
"""Key of a fix to a plan that does not fit, and to what restores."""


@pytest.mark.parametrize("name", full_cases(FIXES, "missing", "dtype", "shape"))
def test_fixes(tmp_path, name):
    change, fix = FIXES[name]
    te.save(tmp_path / "a", state_of(plan_of()), plan=plan_of())
    plan = plan_of(**change)
    with pytest.raises(CheckpointError) as error:
        te.restore(tmp_path / "a", state_of(plan, 1), plan=plan)
    assert differences._FIXES[name] in str(error.value)
    if callable(fix):
        fix(tmp_path / "a", plan)
    else:
        te.restore(tmp_path / "a", state_of(plan, 1), plan=plan, **fix)


def test_a_checkpoint_of_orbax_alone(tmp_path):
    (tmp_path / "_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match="Restore it with the Checkpointer that"):
        te.restore(tmp_path, state_of(plan_of()), plan=plan_of())


def test_hyperparameters_are_restored_and_never_shared_by_chance(tmp_path):
    def rule(rate):
        return optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=rate)

    apart = plan_of(rules={"movie": rule(0.1), "user": rule(0.2)})
    state = state_of(apart)
    name = apart.stacks[0].name
    own = te.optimizers.with_hyperparameters(
        {name: state["slots"][name]}, learning_rate=0.3
    )
    te.save(tmp_path / "a", state | {"slots": state["slots"] | own}, plan=apart)
    restored = te.restore(tmp_path / "a", state_of(apart, 1), plan=apart)
    rate = restored["slots"][name].hyperparams["learning_rate"]
    assert float(rate) == np.float32(0.3)
    together = plan_of(rules=rule(0.1))
    with pytest.raises(CheckpointError, match="share '.*learning_rate' now"):
        te.restore(tmp_path / "a", state_of(together), plan=together)


CONVERSIONS = {
    "float32 to bfloat16": ("float32", "bfloat16", RULE),
    "bfloat16 to float32": ("bfloat16", "float32", RULE),
    "int8 to float32": ("int8", "float32", None),
}


@pytest.mark.parametrize(
    ("old", "new", "rule", "is_abstract"),
    quick_cases(
        matrix(with_ids(CONVERSIONS), [False, True]),
        "float32 to bfloat16-False",
        "int8 to float32-True",
    ),
)
def test_rows_are_rounded_on_request(tmp_path, old, new, rule, is_abstract):
    """Slot variables are float32 in all types, so they keep their bits."""
    rules = {"movie": rule, "user": RULE}
    plan = plan_of(rules=rules, dtypes={"movie": old})
    other = plan_of(rules=rules, dtypes={"movie": new}, devices=3)
    state = trained(plan)
    te.save(tmp_path / "a", state, plan=plan)
    into = state_of(other, 1)
    if is_abstract:
        into = jax.eval_shape(lambda: into) | {"step": 0}
    restored = te.restore(tmp_path / "a", into, plan=other, dtypes="convert")
    tables, slots = numbers_of(state, plan)
    found, found_slots = numbers_of(restored, other)
    wanted = np.asarray(tables["movie"], np.float32).astype(jnp.dtype(new))
    np.testing.assert_array_equal(found["movie"], wanted.astype(np.float32))
    np.testing.assert_array_equal(found["user"], tables["user"])
    for table in slots:
        for name in slots[table].keys() & found_slots[table].keys():
            np.testing.assert_array_equal(found_slots[table][name], slots[table][name])


def test_new_rows_of_shapes(tmp_path):
    plan, grown = plan_of(), plan_of({"movie": 50, "user": 7})
    te.save(tmp_path / "a", state_of(plan), plan=plan)
    shapes = jax.eval_shape(lambda: state_of(grown)) | {"step": 0}
    with pytest.raises(CheckpointError, match="Pass a state of arrays"):
        te.restore(tmp_path / "a", shapes, plan=grown)
    te.restore(tmp_path / "a", state_of(grown), plan=grown)
