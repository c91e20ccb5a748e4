"""The choice of a stack's backend: what the user asks for, and what is possible."""

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.placements import mesh_of_shape
from tests.rejections import rejects
from tpu_embedding.sparse_core import backend as sparse_core_backend
from tpu_embedding.sparse_core.operations import unavailable_reason

ADAGRAD = te.optimizers.adagrad(0.1)


@pytest.fixture(autouse=True)
def recent_jax(monkeypatch):
    """Plans for TPUs as with the jax that their programs need; nothing is compiled."""
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 12, 0)))


def backend_of(backend, mesh=None, optimizer=ADAGRAD, hardware=None, **options):
    placement = options.pop("placement", None)
    options = dict(vocabulary_size=100) | options
    table = te.TableConfig(dim=20, name="t", **options)
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh or mesh_of(2),
        optimizer=optimizer,
        placement=placement,
        hardware=hardware and te.hardware.hardware_by_name(hardware),
        **({} if backend is None else {"backend": backend}),
    )
    (stack,) = plan.stacks
    assert stack.layout.banks == getattr(stack.backend, "cores", 1)
    assert stack.backend.reason in str(plan)
    return stack.backend


def ways_of(backend):
    return backend.lookups, backend.updates


@pytest.mark.parametrize("hardware", ["v5p", "cpu"])
def test_xla_is_the_default(hardware):
    assert ways_of(backend_of(None, hardware=hardware)) == ("xla", "xla")


@pytest.mark.parametrize(
    ("hardware", "cores"),
    [("v5p", 4), ("v6e", 2), ("tpu7x", 2), ("cpu", 2), ("gpu", 2)],
)
def test_asked_for_by_name(hardware, cores):
    found = backend_of("sparse_core", hardware=hardware)
    assert ways_of(found) == ("sparse_core", "sparse_core")
    assert found.cores == cores


OTHERS = {
    "v5e": (dict(hardware="v5e"), "v5e has no SparseCores"),
    "v4": (dict(hardware="v4"), "v4 has no SparseCores"),
    "bfloat16": (dict(dtype=jnp.bfloat16), "not bfloat16"),
    "int8": (dict(dtype=jnp.int8, optimizer=None), "not int8"),
    "replicated": (dict(placement=te.Replicated()), "not split over all devices"),
    "one axis": (
        dict(mesh=mesh_of_shape("2x2"), placement=te.Sharded(axes=("model",))),
        "not split over all devices",
    ),
    "quantized": (
        dict(
            quantization_config=te.QuantizationConfig(num_buckets=3, lower=0, upper=1)
        ),
        "do not quantize",
    ),
    "huge": (dict(hardware="v5p", vocabulary_size=2**28 + 2), "at most 16.00 GiB"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_stacks_that_keep_the_exchange(name):
    options, why = OTHERS[name]
    found = backend_of("sparse_core", **options)
    assert ways_of(found) == ("xla", "xla")
    assert why in found.reason


RULES = {
    "none": (None, "no optimizer"),
    "by row": (te.optimizers.rowwise_adagrad(0.1), "float32[] per row"),
    "every row": (te.optimizers.every_row(ADAGRAD), "every row"),
    "totals": (te.optimizers.adafactor(0.1), "totals"),
    "mixes elements": (te.optimizers.lamb(0.1), ""),
    "sets rows": (te.optimizers.assign(), "overwrites rows"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_whose_updates_keep_the_exchange(name):
    optimizer, why = RULES[name]
    found = backend_of("sparse_core", optimizer=optimizer)
    assert ways_of(found) == ("sparse_core", "xla")
    assert why in found.reason


def test_an_older_jax_keeps_the_exchange_of_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    found = backend_of("sparse_core", hardware="v5p")
    assert ways_of(found) == ("xla", "xla")
    assert "needs jax 0.12" in found.reason
    assert ways_of(backend_of("sparse_core")) == ("sparse_core", "sparse_core")


@pytest.mark.parametrize(("hardware", "way"), [("v5p", "xla"), ("cpu", "sparse_core")])
def test_several_slices_of_a_tpu_keep_the_exchange(monkeypatch, hardware, way):
    monkeypatch.setattr(sparse_core_backend, "num_slices_of", lambda mesh: 2)
    found = backend_of("sparse_core", hardware=hardware)
    assert ways_of(found) == (way, way)
    assert ("between 2 slices" in found.reason) == (way == "xla")


@pytest.mark.parametrize(("num_devices", "fits"), [(1024, True), (2048, False)])
def test_libtpu_takes_4096_sparse_cores(num_devices, fits):
    hardware = te.hardware.hardware_by_name("v5p")
    reason = unavailable_reason(hardware, num_devices)
    assert reason == (
        None if fits else "libtpu takes up to 4,096 SparseCores, not 8,192"
    )


def test_cores_are_those_of_the_chip():
    found = backend_of(te.SparseCore(cores=2), hardware="v5p")
    assert ways_of(found) == ("xla", "xla")
    assert "te.SparseCore(cores=2), but a v5p device has 4" in found.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_ids", 4), ("max_ids", 20), ("cores", 1), ("exchange", "no")],
)
def test_rejects_options(field, value):
    with rejects(ValueError, field=field, value=value):
        te.SparseCore(**{field: value})


@pytest.mark.parametrize("value", ["tpu", 3, te.SparseCore])
def test_rejects_other_backends(value):
    with rejects(ValueError):
        backend_of(value)
