"""Tests the config files: those of the package, and invalid ones."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.tools.data.yambda.event_samples import HistorySettings
from tpu_embedding.tools.train import (
    ConfigError,
    RunConfig,
    Target,
    apply_overrides,
    list_configs,
    load_config,
)

NAMES = (
    *("dlrm", "dlrm_dcnv2", "dlrm_v4", "dlrm_v4_50m", "dlrm_v4_small"),
    *("movielens", "synthetic", "synthetic_stream", "two_tower"),
)


def test_known_configs():
    assert tuple(sorted(list_configs())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_configs_promise_a_number(name):
    config = load_config(name)
    assert config.name == name
    assert config.target is not None
    docstring = list_configs()[name].read_text().split('"""')[1]
    for word in ("Command:", "Hardware:", "Expected:", "Wall time:"):
        assert word in docstring
    assert "TODO" not in docstring


def test_settings_of_the_benchmark():
    config = load_config("dlrm_v4")
    assert config.batch_size == 8192
    assert (config.loss, config.loss_weight) == ("log_loss", 0.2)
    assert config.max_dense_norm == 1.0
    assert config.exact_auc
    assert config.target == Target(metric="auc", at_least=0.75)
    assert sum(config.data.table_sizes.values()) == 293_051_712
    assert config.data.history == HistorySettings(
        history_length=4_086, min_history=4_086, scan_window=20_000
    )
    assert config.data.whole_window == "first"
    sizes = config.model.hstu
    assert (sizes.dim, sizes.num_layers, sizes.num_heads) == (512, 3, 4)
    assert (sizes.input_dropout, sizes.dropout) == (0.2, 0.1)


def test_optimizers_of_the_benchmark():
    config = load_config("dlrm_v4")
    dense = config.make_dense_optimizer(config)
    adam = describe_rule(dense)["scale_by_adam"]
    assert (adam["b1"], adam["b2"], adam["eps"]) == (0.95, 0.999, 1e-8)
    tables = config.make_table_optimizer(config)
    adagrad = describe_rule(tables)["scale_by_rowwise_adagrad"]
    assert adagrad["epsilon"] == 1e-8
    assert adagrad["initial_accumulator_value"] == 0.0
    ones = jnp.ones((1, 2))
    # optax subtracts a schedule's rate from its last one, in float32.
    tolerance = dict(rtol=1e-6, atol=1e-13)
    for step, rate in ((0, 0.0), (1, 1e-6 / 24_000), (24_000, 1e-6), (30_000, 1e-6)):
        state = optax.tree_utils.tree_set(tables.init(ones), count=step)
        updates, _ = tables.update(ones, state, ones)
        np.testing.assert_allclose(updates, -rate * ones, **tolerance)
        state = optax.tree_utils.tree_set(dense.init(ones), count=step)
        updates, _ = dense.update(ones, state, ones)
        moments = optax.scale_by_adam(b1=0.95, b2=0.999, eps=1e-8)
        wanted, _ = moments.update(ones, state[0])
        np.testing.assert_allclose(updates, -rate * wanted, **tolerance)


def test_config_by_path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\n"
        "from tpu_embedding.tools.train import load_config\n"
        "config = dataclasses.replace(load_config('synthetic'), name='mine')\n"
    )
    assert load_config(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define `config`, .* got nothing"),
        ("config = 3\n", "got a int of that name"),
        (
            "a = 1\nb = a / 0\n",
            r"fails in line 2 of .*broken.py with ZeroDivisionError",
        ),
        ("a = 1\nb = (\n", r"broken.py fails with SyntaxError: .*line 2"),
        (
            "import not_there\n",
            "fails in line 1 of .*broken.py with ModuleNotFoundError",
        ),
    ],
)
def test_broken_files(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(str(path))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'nothing'.*" + ", ".join(NAMES)):
        load_config("nothing")


def test_all_problems_of_a_config_in_one_error():
    fields = {
        field.name: getattr(load_config("dlrm"), field.name)
        for field in dataclasses.fields(RunConfig)
    }
    fields |= {"batch_size": 0, "seed": -1, "loss": "hinge"}
    with pytest.raises(ValueError, match="batch_size.*seed.*loss.*'dlrm'"):
        RunConfig(**fields)


OWN_TYPES = """
from __future__ import annotations
import dataclasses, pathlib, pickle
import beside_it
from tpu_embedding.tools.train import load_config

@dataclasses.dataclass(frozen=True)
class Source:
    path: pathlib.Path = pathlib.Path(beside_it.PATH)
    rate: float | None = None
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"user": 3})

    def open(self, data_dir, *, batch_size, seed): ...

assert pickle.loads(pickle.dumps(Source())) == Source()
config = dataclasses.replace(load_config("synthetic"), data=Source())
"""


def test_types_of_an_own_file(tmp_path):
    """Annotations, pickles and neighbours of a config work as those of a script."""
    (tmp_path / "beside_it.py").write_text("PATH = 'clicks.csv'\n")
    (tmp_path / "mine.py").write_text(OWN_TYPES)
    before = list(sys.path)
    config = load_config(str(tmp_path / "mine.py"))
    assert sys.path == before
    config = apply_overrides(config, ["data.path=other.csv", "data.rate=2"])
    assert config.describe()["data"] == {
        "type": "Source",
        "path": "other.csv",
        "rate": 2.0,
        "sizes": {"user": 3},
    }


def test_an_edited_file_is_read_anew(tmp_path):
    path = tmp_path / "mine.py"
    for seed in (1, 2):
        path.write_text(
            "import dataclasses\n"
            "from tpu_embedding.tools.train import load_config\n"
            f"config = dataclasses.replace(load_config('synthetic'), seed={seed})\n"
        )
        assert load_config(str(path)).seed == seed
