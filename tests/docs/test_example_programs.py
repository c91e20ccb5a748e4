"""The programs of docs/examples run by themselves, and their pages show them."""

import re
import runpy
import sys

import numpy as np
import pytest

from tests.docs.test_doc_examples import DOCS

EXAMPLES = DOCS / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run_program(name, *arguments, monkeypatch):
    """Returns the global names of a program that ran in this process."""
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    return runpy.run_path(path, run_name="__main__")


def check_micro_batches(program):
    """One batch with the samples of all micro-batches gives the same gradients."""
    te, nnx = program["te"], program["nnx"]
    model = program["Model"](nnx.Rngs(0))
    optimizer = te.Optimizer(model, program["optax"].adam(1e-2))
    whole = [(program["ids"].reshape(64, 3), program["labels"].reshape(64))]
    for norm in program["norms"]:
        found = program["train_step"](model, optimizer, whole)
        np.testing.assert_allclose(found, norm, rtol=1e-4)  # sums of another order


def check_serving(program):
    tables = program["model"].embedding.embedding_tables()
    expected = tables["movies"][[1, 2, 3]].mean(axis=0) @ tables["movies"][7:11].T
    np.testing.assert_allclose(program["scores"][0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(program["user_rows"], tables["users"][3:5])
    assert set(program["served"].tables) == {"movies"}


def check_tabular(program):
    assert program["result"] > 0.8
    assert program["scores"].shape == (4000,)


def check_two_towers(program):
    assert program["hits"] > 0.5


def check_pretrained(program):
    np.testing.assert_array_equal(program["changed"], np.arange(100) < 16)


def check_resume(program):
    assert np.isfinite(program["resumed"])


LEARN = {"linen_dlrm": 0.7, "memory_tables": 0.5, "two_towers": 0.7}
LEARN["weighted_ragged"] = 0.8
"""Bounds of the last loss, relative to the first."""

CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


TESTED = sorted(CHECKS.keys() | LEARN.keys())


def test_every_program_is_tested():
    """The others in test_loaders_example and test_movielens_example."""
    assert set(PROGRAMS) == {*TESTED, "loaders", "ranking"}


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("name", TESTED)
def test_program_computes_what_its_page_says(name, monkeypatch, capsys):
    program = run_program(name, monkeypatch=monkeypatch)
    if name in LEARN:
        assert program["losses"][-1] < LEARN[name] * program["losses"][0]
    CHECKS.get(name, id)(program)
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_page_shows_the_program(name):
    page = (EXAMPLES / f"{name}.md").read_text()
    _, program = (EXAMPLES / f"{name}.py").read_text().split('"""\n\n', 1)
    shown = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert re.sub(r"\n+", "\n", shown) == re.sub(r"\n+", "\n", program)
