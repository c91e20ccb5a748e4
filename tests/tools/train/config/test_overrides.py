"""Tests `--set KEY=VALUE`."""

import dataclasses
import pathlib
from typing import Optional

import pytest

from tpu_embedding.tools.train import ConfigError, apply_overrides, load_config


@pytest.mark.parametrize(
    ("assignment", "read", "wanted"),
    [
        ("num_steps=7", lambda c: c.num_steps, 7),
        ("batch_size=1_000", lambda c: c.batch_size, 1000),
        ("table_learning_rate=1e-3", lambda c: c.table_learning_rate, 1e-3),
        ("capacity=4", lambda c: c.capacity, 4),
        ("capacity=none", lambda c: c.capacity, None),
        ("kernels=interpreter", lambda c: c.kernels, "interpreter"),
        ("table_dtype=bfloat16", lambda c: c.table_dtype, "bfloat16"),
        ("table_dtype=none", lambda c: c.table_dtype, None),
        ("name=other", lambda c: c.name, "other"),
        ("model.dim=8", lambda c: c.model.dim, 8),
        ("model.hidden_sizes=5,6,7", lambda c: c.model.hidden_sizes, (5, 6, 7)),
        ("data.zipf_exponent=0", lambda c: c.data.zipf_exponent, 0.0),
        ("target.relative_to=none", lambda c: c.target.relative_to, None),
    ],
)
def test_values_are_read_by_type(assignment, read, wanted):
    config = load_config("synthetic")
    value = read(apply_overrides(config, [assignment]))
    assert value == wanted
    assert type(value) is type(wanted)
    assert read(config) != wanted or wanted is None


def test_last_assignment_counts_and_sections_keep_the_rest():
    config = load_config("synthetic")
    changed = apply_overrides(config, ["model.dim=4", "seed=1", "model.dim=5"])
    assert (changed.model.dim, changed.seed) == (5, 1)
    assert changed.model.hidden_sizes == config.model.hidden_sizes
    assert changed.data == config.data


def test_schedules_follow_the_number_of_steps():
    config = apply_overrides(load_config("synthetic"), ["num_steps=10"])
    optimizer = config.make_dense_optimizer(config)
    params = {"w": 1.0}
    state = optimizer.init(params)
    sizes = []
    for _ in range(11):
        updates, state = optimizer.update({"w": 1.0}, state)
        sizes.append(abs(float(updates["w"])))
    assert sizes[10] == pytest.approx(0.02 * sizes[0], rel=1e-3)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps=7", "'steps' is no key of this config; its keys are .*num_steps"),
        ("model.width=7", "'model.width' is no key .*model.dim"),
        ("make_table_optimizer=x", "is a function, which only the config file can"),
        ("model=x", "'model' is a section, which only the config file can change"),
        ("num_steps", "takes KEY=VALUE"),
        ("num_steps=many", "num_steps must be an int, got 'many'"),
        ("num_steps=1.5", "must be an int"),
        ("capacity=x", "must be an int or none"),
        ("model.hidden_sizes=1,x", "ints separated by commas"),
        ("batch_size=0", "RunConfig.batch_size must be an int of at least 1"),
        ("model.hidden_sizes=1,,2", "ints separated by commas"),
        ("loss=hinge", "loss must be one of log_loss, squared_error, .*, got 'hinge'"),
        ("target.relative_to=me", "must be one of teacher or none, got 'me'"),
        ("kernels=none", "RunConfig.kernels must be one of"),
        ("table_dtype=int8", "RunConfig.table_dtype must be one of .*, got 'int8'"),
        ("model.dim=0", "ClickModelConfig.dim must be positive"),
        ("table_learning_rate=nan", "must be a finite number, got 'nan'"),
    ],
)
def test_refusals(assignment, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(load_config("synthetic"), [assignment])


@dataclasses.dataclass(frozen=True)
class Section:
    path: pathlib.Path = pathlib.Path("a")
    is_shuffled: bool = True
    rate: Optional[float] = None  # noqa: UP045


@dataclasses.dataclass(frozen=True)
class Config:
    section: Section = Section()


@pytest.mark.parametrize(
    ("assignment", "wanted"),
    [
        ("section.path=b/c", Section(path=pathlib.Path("b/c"))),
        ("section.is_shuffled=false", Section(is_shuffled=False)),
        ("section.rate=2", Section(rate=2.0)),
    ],
)
def test_types_of_an_own_section(assignment, wanted):
    assert apply_overrides(Config(), [assignment]).section == wanted


def test_a_bool_is_no_nonempty_string():
    with pytest.raises(ConfigError, match="must be true or false, got 'no'"):
        apply_overrides(Config(), ["section.is_shuffled=no"])
