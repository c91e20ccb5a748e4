"""Tests the config files: those of the package, and invalid ones."""

import dataclasses

import pytest

from tpu_embedding.training import ConfigError, RunConfig, list_configs, load_config

NAMES = ("dlrm", "dlrm_dcnv2", "movielens", "synthetic", "two_tower")


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


def test_config_by_path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses\n"
        "from tpu_embedding.training import load_config\n"
        "config = dataclasses.replace(load_config('synthetic'), name='mine')\n"
    )
    assert load_config(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define `config`, .* got nothing"),
        ("config = 3\n", "got a int of that name"),
        ("a = 1\nb = a / 0\n", r"fails in line 2 with ZeroDivisionError"),
        ("a = 1\nb = (\n", r"fails in line 2 with SyntaxError"),
        ("import not_there\n", "fails in line 1 with ModuleNotFoundError"),
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
