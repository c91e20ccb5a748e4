"""The ranking example on the real data set, which is not part of this repository."""

import pytest

from tests.docs.test_example_programs import run_program


@pytest.mark.full
def test_ranking_reaches_the_error_that_the_page_promises(
    movielens_dir, monkeypatch, capsys
):
    run_program("ranking", movielens_dir, monkeypatch=monkeypatch)
    rmse = float(capsys.readouterr().out.rsplit(" ", 1)[1])
    # The mean rating alone gives 1.154 on this split.
    assert rmse < 0.915


def test_ranking_names_the_file_that_is_missing(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="has no file u1.base"):
        run_program("ranking", tmp_path, monkeypatch=monkeypatch)
