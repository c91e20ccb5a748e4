"""The opening lines of a run, and the records that a resumed run keeps."""

import json

import pytest

from tpu_embedding.tools.train.reporting import drop_repeated_records
from tpu_embedding.tools.train.run_directory import RECORDS_FILE, read_records


@pytest.mark.parametrize(
    ("step", "evaluates", "kept"),
    [
        (0, False, []),
        (2, False, ["train 2", "evaluation 2"]),
        (2, True, ["train 2"]),
        (4, True, ["train 2", "evaluation 2", "train 4"]),
        (4, False, ["train 2", "evaluation 2", "train 4", "evaluation 4", "result 4"]),
    ],
)
def test_a_resumed_run_drops_the_records_that_it_repeats(
    tmp_path, step, evaluates, kept
):
    start = {"run": {"seed": 3}, "origin": None}
    records = [start]
    for done in (2, 4):
        records += [
            {"step": done, name: {"x": 0.5}} for name in ("train", "evaluation")
        ]
    records.append({"result": {"step": 4}})
    lines = [json.dumps(record) for record in records]
    (tmp_path / RECORDS_FILE).write_text("\n".join([*lines, '{"step": 5, "tr']))
    drop_repeated_records(tmp_path, step, evaluates=evaluates)
    first, *others = read_records(tmp_path / RECORDS_FILE)
    assert first == start
    found = [(set(x) - {"step"}, x.get("step", 4)) for x in others]
    assert [f"{name} {done}" for (name,), done in found] == kept
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS_FILE]
