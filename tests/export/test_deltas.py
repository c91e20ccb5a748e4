"""A chain of deltas, applied to a full export, equals the later full export."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import full_cases, with_ids
from tpu_embedding.tables import row_windows

ExportError = te.export.ExportError
FULL = pytest.mark.full
EXHAUSTIVE = pytest.mark.exhaustive
SIZES = {"a/é": 37, "b": 5, "c": 64}
BATCH = 24
RULE = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))


def layer_of(num_devices=1, dtype="float32", rule=RULE, dim=8, seed=0):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size,
                dim=dim,
                name=name,
                combiner="sum",
                dtype=dtype,
            )
        )
        for name, size in SIZES.items()
    }
    plan = te.make_plan(features, mesh_of(num_devices), optimizer=rule)
    return te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(seed))


@nnx.jit
def train_step(model, optimizer, ids):
    def loss_fn(model, ids):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(model(ids)))

    _, gradients = te.value_and_grad(loss_fn)(model, ids)
    optimizer.update(model, gradients)


def ids_of(step):
    random = np.random.default_rng(step)
    return {
        name: (size * random.random((BATCH, 2)) ** 3).astype(np.int32)
        for name, size in SIZES.items()
    }


class Trainer:
    """A model in training, whose exports land in numbered directories."""

    def __init__(self, directory, **options):
        self.directory, self.steps = directory, 0
        self.model = layer_of(**options)
        self.optimizer = te.Optimizer(self.model, optax.sgd(0.1))

    def train(self, steps=2):
        for _ in range(steps):
            train_step(self.model, self.optimizer, ids_of(self.steps))
            self.steps += 1

    def full(self, name, **options):
        path = self.directory / name
        te.export.save_tables(self.model, path, **options)
        return path

    def base(self, name="base", **options):
        return self.full(name, optimizer=self.optimizer, **options)

    def delta(self, name):
        te.export.save_delta(self.model, self.optimizer, self.directory / name)
        return self.directory / name

    def chain(self, num_deltas, steps=2):
        """Returns an export and the deltas behind it."""
        base, deltas = self.base(), []
        for i in range(num_deltas):
            self.train(steps)
            deltas.append(self.delta(f"delta{i}"))
        return base, deltas


def table_bytes(directory):
    return {x.name: x.read_bytes() for x in (directory / "tables").iterdir()}


def check_chain(tmp_path, exported="float32", **options):
    trainer = Trainer(tmp_path, **options)
    trainer.train()
    base = trainer.base(dtype=exported)
    first = table_bytes(base)
    deltas = []
    for i in range(10):
        trainer.train(steps=i % 3)
        deltas.append(trainer.delta(f"delta{i}"))
    for delta in deltas:
        te.export.apply_delta(base, delta)
    wanted = table_bytes(trainer.full("later", dtype=exported))
    assert table_bytes(base) == wanted != first
    sizes = [
        sum(len(t.row_ids) for t in te.export.read_delta(d).tables.values())
        for d in deltas
    ]
    assert sizes[0] == 0 and 0 < min(sizes[1:3]) < sum(SIZES.values())


@FULL
def test_chain_of_ten_equals_the_later_export(tmp_path, monkeypatch):
    # Several blocks of rows, and other blocks of the record.
    monkeypatch.setattr(row_windows, "_MIN_BLOCK_BYTES", 200)
    check_chain(tmp_path)


@pytest.mark.parametrize(
    ("num_devices", "dtype", "exported"),
    [
        pytest.param(3, "bfloat16", "int8", marks=FULL),
        pytest.param(3, "float32", "float32", marks=EXHAUSTIVE),
        pytest.param(8, "float32", "int8", marks=EXHAUSTIVE),
        pytest.param(3, "bfloat16", "bfloat16", marks=EXHAUSTIVE),
        pytest.param(8, "float16", "float32", marks=EXHAUSTIVE),
    ],
)
def test_chain_of_ten_of_every_type(tmp_path, num_devices, dtype, exported):
    check_chain(tmp_path, exported, num_devices=num_devices, dtype=dtype)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("chain"))
    return trainer, *trainer.chain(3)


@pytest.fixture
def copies(chain, tmp_path):
    """Returns the trainer, and copies of its export and deltas that may change."""
    trainer, *paths = chain
    base, deltas = paths
    base = shutil.copytree(base, tmp_path / "base")
    return trainer, base, [shutil.copytree(x, tmp_path / x.name) for x in deltas]


def refuses(base, delta, match):
    """Checks that a delta is refused, and the export stays as it is."""
    before = table_bytes(base), (base / "export.json").read_bytes()
    with pytest.raises(ExportError, match=match):
        te.export.apply_delta(base, delta)
    assert before == (table_bytes(base), (base / "export.json").read_bytes())


def test_wrong_order_is_refused(copies):
    _, base, (first, second, third) = copies
    refuses(base, second, "step 0.*follows.*step 2.*order in which they were written")
    te.export.apply_delta(base, first)
    refuses(base, first, "applied .* already; go on with the next")
    refuses(base, third, "full export")
    te.export.apply_delta(base, second)
    refuses(base, first, "each once")
    te.export.apply_delta(base, third)


def test_foreign_bases_are_refused(copies, tmp_path):
    trainer, base, (first, *_) = copies
    other = Trainer(tmp_path / "other", seed=1)
    refuses(other.base(), first, "another model's export")
    refuses(other.full("plain"), first, "starts no chain.*optimizer=optimizer")
    document = json.loads((base / "export.json").read_text())
    document["tables"]["b"]["vocabulary_size"] = 6
    (base / "export.json").write_text(json.dumps(document))
    refuses(base, first, "'b' .* vocabulary_size 5, got 6")
    with pytest.raises(ExportError, match="save_delta"):
        te.export.read_delta(base)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
@pytest.mark.parametrize("file", ["delta.json", "tables/c.safetensors"])
def test_damaged_deltas_are_refused(copies, file, damage):
    _, base, (first, *_) = copies
    path = first / file
    whole = path.read_bytes()
    middle = len(whole) // 2
    match damage:
        case "flip":
            path.write_bytes(
                whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
            )
        case "cut":
            path.write_bytes(whole[:middle])
        case "delete":
            path.unlink()
    refuses(base, first, file.split("/")[-1])


@pytest.mark.parametrize("applied", [0, 1, 2])
def test_damaged_exports_are_refused(copies, applied):
    _, base, deltas = copies
    for delta in deltas[:applied]:
        te.export.apply_delta(base, delta)
    path = base / "tables" / "c.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    refuses(base, deltas[applied], "c.safetensors.*SHA-256.*new full export")


def test_exports_of_releases_without_digests_are_refused(copies):
    _, base, (first, *_) = copies
    document = json.loads((base / "export.json").read_text())
    del document["files"]
    (base / "export.json").write_text(json.dumps(document))
    refuses(base, first, "must have the field 'files'; export the model again.$")


def test_an_interrupted_delta_is_applied_again(copies, chain, monkeypatch):
    trainer, base, (first, second, _) = copies
    from tpu_embedding.export import deltas

    write, written = deltas._write_rows, []

    def fail_later(*args):
        if written:
            raise OSError("no space left on device")
        written.append(write(*args))

    with monkeypatch.context() as patch:
        patch.setattr(deltas, "_write_rows", fail_later)
        with pytest.raises(OSError, match="space"):
            te.export.apply_delta(base, first)
    refuses(base, second, "interrupted; apply that one again")
    te.export.apply_delta(base, first)
    whole = shutil.copytree(chain[1], base.with_name("whole"))
    te.export.apply_delta(whole, first)
    assert table_bytes(base) == table_bytes(whole)


def test_a_full_disk_leaves_the_chain_as_it_is(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    base, _ = trainer.chain(0)
    trainer.train()
    from tpu_embedding.export import deltas

    def fail(path):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(deltas, "file_digest", fail)
        with pytest.raises(OSError, match="space"):
            trainer.delta("delta")
    assert not (tmp_path / "delta").exists()
    te.export.apply_delta(base, trainer.delta("delta"))
    assert table_bytes(base) == table_bytes(trainer.full("later"))


def test_delta_holds_the_rows_looked_up(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train(1)
    trainer.base()
    trainer.train(1)
    delta = te.export.read_delta(trainer.delta("delta"))
    values = trainer.model.embedding_tables()
    assert set(delta.tables) == {"a/é", "b", "c"}
    for name, (row_ids, rows) in delta.tables.items():
        wanted = np.unique(ids_of(1)[name])
        np.testing.assert_array_equal(row_ids, wanted)
        np.testing.assert_array_equal(rows, values[name][wanted])
    assert delta.base_steps == dict.fromkeys(delta.tables, 1)
    assert delta.steps == dict.fromkeys(delta.tables, 2)


@FULL
@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_chain_of_pipelined_steps(tmp_path, mode):
    trainer = Trainer(tmp_path, num_devices=3)
    model, optimizer = trainer.model, trainer.optimizer
    pipeline = te.PipelinedTrainStep(
        lambda model, ids: sum(jnp.sum(x**2) for x in model(ids).values()), mode=mode
    )
    pipeline(model, optimizer, ids_of(0))
    pipeline(model, optimizer, ids_of(1))
    base = trainer.base()
    pipeline(model, optimizer, ids_of(2))
    first = trainer.delta("first")
    pipeline.drain(model, optimizer)
    second = trainer.delta("second")
    for delta, step in ((first, 1), (second, 2)):
        for name, rows in te.export.read_delta(delta).tables.items():
            np.testing.assert_array_equal(rows.row_ids, np.unique(ids_of(step)[name]))
        te.export.apply_delta(base, delta)
    assert table_bytes(base) == table_bytes(trainer.full("later"))


@FULL
def test_a_chain_goes_on_after_a_restore_on_other_devices(tmp_path):
    trainer = Trainer(tmp_path)
    base, (first,) = trainer.chain(1)
    te.save(tmp_path / "checkpoint", (trainer.model, trainer.optimizer))
    resumed = Trainer(tmp_path, num_devices=3)
    te.restore(tmp_path / "checkpoint", (resumed.model, resumed.optimizer))
    resumed.steps = trainer.steps
    resumed.train()
    te.export.apply_delta(base, first)
    te.export.apply_delta(base, resumed.delta("second"))
    assert table_bytes(base) == table_bytes(resumed.full("later"))


@pytest.mark.parametrize("options", [{"tables": ["b"]}, {"slots": "initialize"}])
def test_a_restore_in_part_ends_the_chain(tmp_path, options):
    trainer = Trainer(tmp_path)
    trainer.chain(0)
    te.save(tmp_path / "checkpoint", (trainer.model, trainer.optimizer))
    state = trainer.model, trainer.optimizer
    te.restore(tmp_path / "checkpoint", state, **options)
    with pytest.raises(ExportError, match="restore of some tables.*save_tables"):
        trainer.delta("delta")


ONES = {"c": np.ones((64, 8), np.float32)}


def set_by_stacks(trainer):
    model, optimizer = trainer.model, trainer.optimizer
    stacks = te.functional.with_table_values(model.tables.get_value(), ONES, model.plan)
    model.tables.set_value(stacks)
    slots = te.functional.with_touched_tables(
        optimizer.slots.get_value()[""], ONES, model.plan
    )
    optimizer.slots.set_value({"": slots})


def restore_without_the_optimizer(trainer):
    other = layer_of()
    other.set_embedding_tables(ONES)
    te.save(trainer.directory / "other", other)
    te.restore(trainer.directory / "other", trainer.model, tables=["c"])


def save_and_restore(trainer):
    trainer.model.set_embedding_tables(ONES)
    te.save(trainer.directory / "saved", (trainer.model, trainer.optimizer))
    restored = Trainer(trainer.directory, num_devices=3)
    te.restore(trainer.directory / "saved", (restored.model, restored.optimizer))
    trainer.model, trainer.optimizer = restored.model, restored.optimizer


def split_and_merge(trainer):
    graph, state = nnx.split((trainer.model, trainer.optimizer))
    nnx.merge(graph, state)[0].set_embedding_tables(ONES)
    trainer.model, trainer.optimizer = nnx.merge(graph, state)
    trainer.model.tables.set_value(
        te.functional.with_table_values(
            trainer.model.tables.get_value(), ONES, trainer.model.plan
        )
    )


WAYS_TO_SET_ROWS = {
    "set_embedding_tables": lambda t: t.model.set_embedding_tables(ONES),
    "the optimizer's": lambda t: t.optimizer.set_embedding_tables(t.model, ONES),
    "import with the optimizer": lambda t: te.checkpoint.import_tables(
        ONES, t.model, t.optimizer
    ),
    "import without": lambda t: te.checkpoint.import_tables(ONES, t.model),
    "with_touched_tables": set_by_stacks,
    "restore without the optimizer": restore_without_the_optimizer,
    "checkpoint": save_and_restore,
    "split and merge": split_and_merge,
}


@pytest.mark.parametrize("trained", [0, pytest.param(1, marks=FULL)])
@pytest.mark.parametrize("way", full_cases(with_ids(WAYS_TO_SET_ROWS), "checkpoint"))
def test_rows_set_by_hand_count_as_touched(tmp_path, way, trained):
    trainer = Trainer(tmp_path)
    trainer.train()
    base, _ = trainer.chain(0)
    way(trainer)
    trainer.train(trained)
    delta = trainer.delta("delta")
    ids = te.export.read_delta(delta).tables["c"].row_ids
    np.testing.assert_array_equal(ids, np.arange(64))
    te.export.apply_delta(base, delta)
    trainer.train()
    te.export.apply_delta(base, trainer.delta("next"))
    assert table_bytes(base) == table_bytes(trainer.full("later"))


def test_models_that_one_traced_function_made_keep_their_own_chains(tmp_path):
    @nnx.jit
    def create():
        return layer_of()

    models = [create() for _ in range(2)]
    optimizers = [te.Optimizer(model, optax.sgd(0.1)) for model in models]
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        train_step(model, optimizer, ids_of(i))
    for i in (1, 0):
        te.export.save_tables(models[i], tmp_path / f"base{i}", optimizer=optimizers[i])
        if i == 1:
            # Both models share the static attributes of the traced function.
            models[1].set_embedding_tables(ONES)
    te.export.save_delta(models[1], optimizers[1], tmp_path / "delta")
    row_ids = te.export.read_delta(tmp_path / "delta").tables["c"].row_ids
    np.testing.assert_array_equal(row_ids, np.arange(64))


def test_a_restore_forgets_what_was_set(tmp_path):
    trainer = Trainer(tmp_path)
    base, _ = trainer.chain(0)
    state = trainer.model, trainer.optimizer
    te.save(tmp_path / "checkpoint", state)
    trainer.model.set_embedding_tables(ONES)
    te.restore(tmp_path / "checkpoint", state)
    delta = trainer.delta("delta")
    assert not te.export.read_delta(delta).tables
    te.export.apply_delta(base, delta)
    assert table_bytes(base) == table_bytes(trainer.full("later"))


@FULL
def test_finalizing_averages_ends_the_chain(tmp_path):
    rule = te.optimizers.adafactor(0.1, use_ema=True)
    trainer = Trainer(tmp_path, rule=te.optimizers.track_touched_rows(rule))
    trainer.chain(1)
    trainer.optimizer.finalize_variable_values(trainer.model)
    with pytest.raises(ExportError, match="finalize_variable_values.*save_tables"):
        trainer.delta("last")


def test_models_without_a_record_are_refused(tmp_path):
    trainer = Trainer(tmp_path, rule=te.optimizers.sgd(0.1))
    with pytest.raises(ExportError, match=r"\['a/é', 'b', 'c'\].*track_touched_rows"):
        trainer.base()
    assert not (tmp_path / "base").exists()
    tracked = Trainer(tmp_path)
    with pytest.raises(ExportError, match="no export that a delta could follow"):
        tracked.delta("delta")
