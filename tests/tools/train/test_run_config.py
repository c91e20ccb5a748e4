"""Config files of the package and of users, and changes of them."""

import dataclasses
import operator

import pytest

from tests.rejections import rejects
from tests.tiers import quick_cases
from tests.tools.train.runs import check_traced
from tpu_embedding.tools.train import (
    ConfigError,
    Target,
    apply_overrides,
    list_configs,
    load_config,
)


def test_a_file_that_is_no_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("config = 3")
    with rejects(ConfigError, fix="`config`"):
        load_config(str(path))
    path.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_config(str(path))


@pytest.mark.parametrize(
    "setting, field, value",
    [
        ("num_steps=100", "num_steps", 100),
        ("capacity=3", "capacity", 3),
        ("capacity=None", "capacity", None),
        ("model.dim=8", "model.dim", 8),
        ("model.hidden_sizes=8 4", "model.hidden_sizes", (8, 4)),
        ("data.zipf_exponent=0.5", "data.zipf_exponent", 0.5),
        ("target.at_most=2", "target.at_most", 2.0),
    ],
)
def test_settings(setting, field, value):
    config = apply_overrides(load_config("synthetic"), [setting])
    assert operator.attrgetter(field)(config) == value


@pytest.mark.parametrize(
    "target, value, teacher, is_met",
    [
        (Target(metric="rmse", at_most=0.94), 0.93, None, True),
        (Target(metric="rmse", at_most=0.94), 0.95, None, False),
        (Target(metric="auc", at_least=0.75), 0.76, 0.7, True),
        (Target(metric="log_loss", at_most=1.1, relative_to="teacher"), 1, None, None),
        (Target(metric="log_loss", at_most=1.1, relative_to="teacher"), 1, 0.9, False),
        (Target(metric="auc", at_least=0.5, relative_to="teacher"), 0.7, 0.8, True),
    ],
)
def test_targets(target, value, teacher, is_met):
    assert target.is_met(value, teacher) is is_met


@pytest.mark.parametrize("target", [None, Target(metric="auc", at_least=0.75)])
@pytest.mark.parametrize("loss", ["clicks", ["click"], None])
def test_an_unknown_loss_is_rejected(loss, target):
    config = load_config("synthetic")
    with rejects(field="loss", value=loss):
        dataclasses.replace(config, loss=loss, target=target)


TINY = dict.fromkeys(["dlrm", "dlrm_dcnv2"], ["data.vocabulary_size=100"])
# Other tests train the remaining configs, or a model of the same kind.
TRACED = quick_cases(sorted(list_configs()), every_case=True)


@pytest.mark.parametrize("name", TRACED)
def test_the_step_of_each_config_can_be_traced(name):
    config = load_config(name)
    assert config.name == name and config.target is not None
    assert config.describe()["batch_size"] == config.batch_size
    check_traced(name, *TINY.get(name, ()))
