"""Tables whose columns lie in several arrays: nothing changes but where the rows lie.

A hardware with a limit of a few kilobytes per array cuts a small table.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.reference import dense_gradients, dense_lookup
from tests.tiers import each_once, quick_cases
from tpu_embedding.rows.packed_rows import PackedRows

SIZE, DIM, BATCH, STEPS = 61, 384, 24, 3
ARRAYS = DIM // 128

OPTIMIZERS = {
    "sgd": te.optimizers.sgd(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adagrad": te.optimizers.adagrad(0.1),
    "adam": te.optimizers.adam(0.1),
    "ftrl": te.optimizers.ftrl(0.1),
    "adafactor": te.optimizers.adafactor(0.1),
    "adafactor_averages": te.optimizers.adafactor(0.1, use_ema=True),
    "every_row": te.optimizers.every_row(te.optimizers.adam(0.1)),
    "bfloat16_slots": te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16),
}
DENSE = ("sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl")


def hardware_of(num_devices, is_cut=True):
    """A v5p on which 128 columns of the table just fit into an array, or all do."""
    num_rows = -(-SIZE // num_devices)
    limit = 4 * 128 * 8 * -(-num_rows // 8) if is_cut else 2**34
    v5p = te.hardware.hardware_by_name("v5p")
    return dataclasses.replace(v5p, max_array_bytes=limit)


def plan_of(num_devices, optimizer, *, hardware=None, **options):
    table = te.TableConfig(vocabulary_size=SIZE, dim=DIM, name="item", combiner="sum")
    return te.make_plan(
        {"items": te.FeatureConfig(table=table)},
        mesh_of(num_devices),
        optimizer=optimizer,
        hardware=hardware or hardware_of(num_devices),
        **options,
    )


def arrays_of(tree):
    """Number of arrays of each packed rows in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PackedRows))
    return [len(x.arrays) for x in leaves if isinstance(x, PackedRows)]


def initial_state(plan):
    values = np.random.default_rng(0).normal(size=(SIZE, DIM)).astype(np.float32)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    return te.functional.with_table_values(tables, {"item": values}, plan, slots=slots)


def batch_of(step):
    """Ids of half of the rows, and cotangents whose sums are exact in any order."""
    random = np.random.default_rng(step)
    ids = {"items": random.integers(0, SIZE // 2, (BATCH, 2)).astype(np.int32)}
    cotangents = random.integers(-4, 5, (BATCH, DIM)).astype(np.float32) / 64
    return ids, {"items": cotangents}


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def train_step(tables, slots, ids, cotangents, plan):
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
    return tables, slots, result.activations


def train(plan):
    """Returns the state after some steps, and the activations of each step."""
    tables, slots = initial_state(plan)
    activations = []
    for step in range(STEPS):
        tables, slots, rows = train_step(tables, slots, *batch_of(step), plan)
        activations.append(np.asarray(rows["items"]))
    return tables, slots, activations


def values_of(tables, slots, plan):
    values = te.functional.unstack_tables(tables, plan)
    return values, te.functional.slot_values(slots, plan, "all")


def assert_equal(here, there):
    jax.tree.map(np.testing.assert_array_equal, here, there)


def assert_close(here, there):
    """XLA fuses the update of columns otherwise, and may round a product once less."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-6)
    jax.tree.map(close, here, there)


@pytest.mark.parametrize(
    ("num_devices", "name"), each_once([1, 2, 3, 8], list(OPTIMIZERS))
)
def test_training_equals_that_of_whole_lines(num_devices, name):
    optimizer, whole = OPTIMIZERS[name], hardware_of(num_devices, is_cut=False)
    plan = plan_of(num_devices, optimizer)
    tables, slots, activations = train(plan)
    assert arrays_of(tables) == [ARRAYS]
    shapes = [slot.shape for slot in plan.stacks[0].slots]
    wanted = [ARRAYS if shape == (DIM,) else 1 for shape in shapes]
    assert sorted(arrays_of(slots)) == sorted(wanted)
    other = plan_of(num_devices, optimizer, hardware=whole)
    other_tables, other_slots, other_activations = train(other)
    assert arrays_of((other_tables, other_slots)) == [1] * (1 + len(shapes))
    assert_close(activations, other_activations)
    values = values_of(tables, slots, plan)
    assert_close(values, values_of(other_tables, other_slots, other))
    if name == "adafactor_averages":
        finalize = te.functional.finalize_variable_values
        tables, slots = finalize(tables, slots, plan)
        other_tables, other_slots = finalize(other_tables, other_slots, other)
        assert_close(
            values_of(tables, slots, plan), values_of(other_tables, other_slots, other)
        )


@pytest.mark.parametrize(
    ("name", "num_devices", "num_shards", "options"),
    [
        ("rowwise_adagrad", 3, 3, {"capacity": 1}),
        pytest.param("adafactor", 3, 3, {"capacity": 1}, marks=pytest.mark.full),
        ("adagrad", 2, 1, {"placement": te.Replicated()}),
    ],
    ids=["rounds", "totals_over_rounds", "copies"],
)
def test_rounds_and_copies_equal_those_of_whole_lines(
    name, num_devices, num_shards, options
):
    results = []
    for is_cut in (True, False):
        hardware = hardware_of(num_shards, is_cut)
        plan = plan_of(num_devices, OPTIMIZERS[name], hardware=hardware, **options)
        tables, slots, activations = train(plan)
        assert arrays_of(tables) == [ARRAYS if is_cut else 1]
        results.append((values_of(tables, slots, plan), activations))
    assert_equal(*results)


@pytest.mark.parametrize(("num_devices", "name"), each_once([1, 2, 3, 8], DENSE))
def test_training_equals_a_dense_reference(num_devices, name):
    plan = plan_of(num_devices, OPTIMIZERS[name])
    tables, slots = initial_state(plan)
    first, _ = values_of(tables, slots, plan)
    tables, slots, activations = train(plan)
    values, _ = values_of(tables, slots, plan)

    dense, rule = np.array(first["item"]), OPTIMIZERS[name]
    state = rule.init(dense)
    is_touched = np.zeros(SIZE, bool)
    for step in range(STEPS):
        ids, cotangents = batch_of(step)
        wanted = dense_lookup({"item": dense}, ids, plan)["items"]
        np.testing.assert_allclose(activations[step], wanted, rtol=1e-5, atol=1e-5)
        gradients, touched = dense_gradients({"item": dense}, ids, cotangents, plan)
        (rows,) = np.nonzero(touched["item"])
        is_touched[rows] = True
        gradient = jnp.float32(gradients["item"][rows])
        old = jax.tree.map(lambda x, at=rows: x[at] if jnp.ndim(x) else x, state)
        updates, new = rule.update(gradient, old, jnp.asarray(dense[rows]))
        dense[rows] += updates
        state = jax.tree.map(
            lambda x, y, at=rows: jnp.asarray(x).at[at].set(y) if jnp.ndim(x) else y,
            *(state, new),
        )
    np.testing.assert_allclose(values["item"], dense, rtol=1e-5, atol=1e-5)
    assert 0 < is_touched.sum() <= SIZE // 2
    assert_equal(values["item"][~is_touched], first["item"][~is_touched])


def test_initial_values_and_slot_values():
    rule = te.optimizers.adagrad(0.1)
    states = []
    for is_cut in (True, False):
        plan = plan_of(3, rule, hardware=hardware_of(3, is_cut))
        tables = te.functional.init_tables(plan, jax.random.key(1))
        slots = te.functional.init_slots(tables, plan)
        random = np.random.default_rng(2).normal(size=(SIZE, DIM))
        new = {"item": {"accumulators": random.astype(np.float32)}}
        slots = te.functional.with_slot_values(slots, new, plan)
        _, slot_values = values = values_of(tables, slots, plan)
        assert_equal(slot_values["item"]["accumulators"], new["item"]["accumulators"])
        states.append(values)
    assert_equal(*states)


@pytest.mark.parametrize("is_cut_first", [True, False])
@pytest.mark.parametrize("name", quick_cases(OPTIMIZERS, "adagrad"))
def test_checkpoints_move_to_other_layouts(name, is_cut_first, tmp_path):
    """Also to fewer devices and to a CPU's rows."""
    cut = plan_of(8, OPTIMIZERS[name])
    cpu = te.hardware.hardware_by_name("cpu")
    whole = plan_of(3, OPTIMIZERS[name], hardware=cpu)
    old, new = (cut, whole) if is_cut_first else (whole, cut)
    tables, slots, _ = train(old)
    saved = {"tables": tables, "slots": slots}
    te.save(tmp_path / "saved", saved, plan=old)
    tables, slots = initial_state(new)
    empty = {"tables": tables, "slots": slots}
    restored = te.restore(tmp_path / "saved", empty, plan=new)
    assert arrays_of(restored["tables"]) == [1 if is_cut_first else ARRAYS]
    assert_equal(
        values_of(restored["tables"], restored["slots"], new),
        values_of(saved["tables"], saved["slots"], old),
    )


def test_files_of_a_checkpoint_are_those_of_whole_lines(tmp_path):
    """A chunk of a file is the same whatever the layout."""
    files = []
    for is_cut in (True, False):
        hardware = hardware_of(2, is_cut)
        plan = plan_of(2, te.optimizers.adagrad(0.1), hardware=hardware)
        tables, slots, _ = train(plan)
        directory = tmp_path / str(is_cut)
        te.save(directory, {"tables": tables, "slots": slots}, plan=plan)
        arrays = [x for x in directory.rglob("*") if x.is_file() and "c" in x.parts]
        files.append({x.relative_to(directory): x.read_bytes() for x in arrays})
    assert len(files[0]) >= 2
    assert files[0] == files[1]


def test_shapes_are_restored(tmp_path):
    plan = plan_of(2, te.optimizers.adagrad(0.1))
    tables, slots, _ = train(plan)
    state = {"tables": tables, "slots": slots}
    te.save(tmp_path / "saved", state, plan=plan)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    found = te.restore(tmp_path / "saved", shapes, plan=plan)
    assert_equal(
        values_of(found["tables"], found["slots"], plan), values_of(tables, slots, plan)
    )


def test_names_of_arrays_differ_from_those_of_whole_lines():
    """A checkpointer that goes by names refuses the rows of the other layout."""
    names = []
    for is_cut in (True, False):
        plan = plan_of(2, None, hardware=hardware_of(2, is_cut))
        tables = te.functional.init_tables(plan, jax.random.key(0))
        paths = jax.tree_util.tree_leaves_with_path(tables)
        names.append({jax.tree_util.keystr(path) for path, _ in paths})
        layout = plan.stacks[0].layout
        assert layout.leaf_name.startswith(f"lines_2x31x{DIM // len(paths)}_")
    assert [len(x) for x in names] == [ARRAYS, 1]
    assert not names[0] & names[1]


def test_tables_of_the_other_layout_are_refused():
    cut, whole = (plan_of(2, None, hardware=hardware_of(2, x)) for x in (True, False))
    tables = te.functional.init_tables(cut, jax.random.key(0))
    ids, _ = batch_of(0)
    with pytest.raises(ValueError, match=r"lines_shape per shard: \(31, 128\), not"):
        te.functional.lookup(tables, ids, whole)


def test_flax_restores_arrays():
    plan = plan_of(2, te.optimizers.adagrad(0.1))
    tables, slots, _ = train(plan)
    saved = serialization.to_bytes((tables, slots))
    found = serialization.from_bytes(initial_state(plan), saved)
    assert_equal(found, (tables, slots))
    for here, there in zip(
        *map(jax.tree.leaves, (found, (tables, slots))), strict=True
    ):
        assert here.sharding == there.sharding
    whole = plan_of(2, te.optimizers.adagrad(0.1), hardware=hardware_of(2, False))
    with pytest.raises(ValueError, match="under the plan of the model"):
        serialization.from_bytes(initial_state(whole), saved)


@nnx.jit
def train_layer(layer, optimizer, ids):
    def loss_fn(layer, ids):
        return jnp.sum(layer(ids)["items"] ** 2)

    _, gradients = te.value_and_grad(loss_fn)(layer, ids)
    optimizer.update(layer, gradients)


def test_exports_are_those_of_whole_lines(tmp_path):
    """Served rows, too."""
    rule = te.optimizers.rowwise_adagrad(0.1)
    ids, exports = batch_of(0)[0], []
    for is_cut in (True, False):
        directory = tmp_path / str(is_cut)
        directory.mkdir()
        plan = plan_of(2, rule, hardware=hardware_of(2, is_cut))
        layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        optimizer = te.Optimizer(layer, optax.sgd(0.1))
        train_layer(layer, optimizer, ids)
        train_layer(layer, optimizer, batch_of(1)[0])
        te.export.save_tables(layer, directory / "tables")
        files = (directory / "tables" / "tables").iterdir()
        exports.append({x.name: x.read_bytes() for x in files})
        values = layer.embedding_tables()["item"]
        np.testing.assert_allclose(
            layer(ids)["items"], values[ids["items"]].sum(axis=1), rtol=1e-6, atol=1e-6
        )
    assert exports[0] == exports[1]


def test_print_names_the_arrays():
    assert "lies in 3 arrays of 12.00 KiB, each of 128 columns" in str(
        plan_of(3, te.optimizers.adagrad(0.1))
    )
