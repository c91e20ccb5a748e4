"""The notebooks run, and their stored outputs match their code."""

import re
import runpy
import types

import pytest

from tests.docs.test_doc_examples import DOCS

NOTEBOOKS = types.SimpleNamespace(
    **runpy.run_path(str(DOCS / "notebooks" / "execute.py"))
)

RESULTS = {
    "ranking": (r"RMSE on held-out ratings: ([\d.]+) stars", 0.80, 0.90),
    "sequences": (r"AUC on held-out samples: ([\d.]+)", 0.85, 1.0),
    "large_table": (r"log loss: [\d.]+ at first, ([\d.]+) at the end", 0.55, 0.64),
}
"""What a notebook prints as its result, and the bounds of its figure.

The teacher of `ranking` has an RMSE of 0.780, and the mean rating 1.138. An untrained
model has an AUC of 0.5, and a log loss of 0.693.
"""


def outputs(notebook):
    """Returns kind and text of each output, by cell."""
    return [
        [(output.output_type, text_of(output)) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def text_of(output):
    return output.get("text") or output.get("data", {}).get("text/plain", "")


def without_figures(found):
    return [
        [(kind, re.sub(r"[\d.,]+|\s+", " ", text).split()) for kind, text in cell]
        for cell in found
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", NOTEBOOKS.NAMES)
def test_notebook_runs_to_its_stored_outputs(name, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # The tests compile slow programs.
    stored, notebook = NOTEBOOKS.read(name), NOTEBOOKS.read(name)
    NOTEBOOKS.execute(notebook)
    assert without_figures(outputs(notebook)) == without_figures(outputs(stored))
    pattern, low, high = RESULTS[name]
    for found in map(outputs, (stored, notebook)):
        kinds = [kind for cell in found for kind, _ in cell]
        assert kinds.count("display_data") >= 3
        assert set(kinds) == {"display_data", "stream"}
        printed = "".join(text for cell in found for _, text in cell)
        assert "arning" not in printed
        assert low < float(re.search(pattern, printed)[1]) < high
