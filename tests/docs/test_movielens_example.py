"""The ranking example on the real data set, which is not part of this repository."""

import runpy

import pytest

from tests.docs.test_example_programs import EXAMPLES, run_program


@pytest.mark.exhaustive
def test_ranking_comes_near_the_error_of_the_page(movielens_dir, monkeypatch):
    train = runpy.run_path(str(EXAMPLES / "ranking.py"))["train"]
    # All 800 steps reach 0.906, and the mean rating alone 1.154.
    monkeypatch.setitem(train.__globals__, "NUM_STEPS", 240)
    assert train(movielens_dir) < 0.935


def test_ranking_names_the_file_that_is_missing(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="u1.base"):
        run_program("ranking", tmp_path, monkeypatch=monkeypatch)
