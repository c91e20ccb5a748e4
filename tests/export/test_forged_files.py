"""Forged exports and deltas run nothing, lead nowhere and need little memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.export.forged_files import CASES, make_originals, outcome_of

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="it tells the peak of memory"
)

QUICK = (
    *("no_files", "empty_signature", "text_of_arguments", "pipe_of_document"),
    *("long_header", "huge_shape", "one_axis", "link_to_tables", "link_to_table"),
    *("link_to_vocabularies", "names_of_no_kind", "program_of_lists"),
    *("link_to_document", "negative_rows", "link_to_base", "pipe_of_base"),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    path = tmp_path_factory.mktemp("originals")
    make_originals(path)
    return path


@pytest.mark.parametrize("case", [x for x in CASES if x.partition("-")[2] in QUICK])
def test_a_forgery_raises_one_error(case, originals, tmp_path):
    assert outcome_of(case, originals, tmp_path / "work") is None


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_forgery_runs_or_opens_anything(tmp_path, step):
    """Each third forgery, or all; a process of its own, as an audit hook stays."""
    command = [sys.executable, "-m", "tests.export.forged_files", tmp_path, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, problems = json.loads(done.stdout)
    assert number > 200 // step and not problems
