"""The ranking example on the real data set, which is not part of this repository."""

import pytest

from tests.docs.test_doc_examples import DOCS, SYBIL


@pytest.mark.full
def test_ranking_reaches_the_error_that_the_page_promises(movielens_dir, capsys):
    document = SYBIL.parse(DOCS / "examples" / "ranking.md")
    document.namespace["folder"] = movielens_dir
    for example in document.examples():
        example.evaluate()
    rmse = float(capsys.readouterr().out.rsplit(" ", 1)[1])
    # The mean rating alone gives 1.154 on this split.
    assert rmse < 0.97
