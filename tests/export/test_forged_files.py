"""Forged exports and deltas run nothing, lead nowhere and need little memory."""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

import tpu_embedding as te
from tests.export.forged_files import (
    CASES,
    MOVIE,
    apply,
    load,
    make_originals,
    outcome_of,
)
from tests.tiers import quick_cases

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="it tells the peak of memory"
)

QUICK = (
    *("no_files", "text_of_arguments", "pipe_of_document", "huge_shape", "one_axis"),
    *("link_to_tables", "names_of_no_kind", "program_of_lists", "negative_rows"),
    *("link_to_base", "other_rows", "other_values"),
)
OUTSIDE = ("../victim", "/victim", "a/../../victim", "", ".", "a\\b", "a\0", "a//b")
KINDS = (None, True, 1.5, "x", [], {}, [[]], 10**400, -1)
TEXTS = ("", "{", "[]", "7", "null", "[" * 100_000, "\ufeff{}")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    path = tmp_path_factory.mktemp("originals")
    make_originals(path)
    return path


@pytest.mark.parametrize("case", [x for x in CASES if x.partition("-")[2] in QUICK])
def test_a_forgery_raises_one_error(case, originals, tmp_path):
    problem, _ = outcome_of(CASES[case], originals, tmp_path / "work")
    assert problem is None


def nodes(document, path=()):
    """Yields the paths to all values of a document but itself."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from nodes(value, (*path, key))


def damaged(text, draw):
    """Gives one field another kind, renames it, or breaks the text."""
    if draw.random() < 0.1:
        return draw.choice(TEXTS)
    document = json.loads(text)
    *outer, last = draw.choice(list(nodes(document)))
    parent = document
    for key in outer:
        parent = parent[key]
    if isinstance(parent, dict) and draw.random() < 0.3:
        parent[draw.choice(OUTSIDE)] = parent.pop(last)
    else:
        others = [x for x in KINDS if not isinstance(x, type(parent[last]))]
        parent[last] = draw.choice(others)
    return json.dumps(document)


def damage_tensors(path, draw):
    """Damages the header of a file of tensors, or changes the length of its rows."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, rows = content[8:end], content[end:]
    if draw.random() < 0.2:
        rows = draw.choice([rows + b"0", rows[:-1]])
    else:
        header = damaged(header, draw).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + rows)


@pytest.mark.parametrize("seed", quick_cases(range(30), *map(str, range(8))))
def test_random_damage_is_refused_or_harmless(seed, originals, tmp_path):
    draw, work = random.Random(seed), tmp_path / "work"
    folder, function = draw.choice([("program", load), ("delta", apply)])
    is_document = draw.random() < 0.5
    names = [x.name for x in sorted((originals / folder).glob("*.json"))]
    name = draw.choice(names) if is_document else MOVIE

    def forge(path):
        if not is_document:
            damage_tensors(path / name, draw)
        else:
            (path / name).write_text(damaged((path / name).read_text(), draw))

    problem, error = outcome_of((forge, function, is_document), originals, work)
    assert problem is None
    if error is None:
        before, after = (
            json.loads((path / folder / name).read_text()) for path in (originals, work)
        )
        # No number that is served depends on these fields.
        differs = {k for k in before if before[k] != after[k]}
        assert differs <= {"versions", "written", "signature"}


def test_the_originals_are_taken_and_nothing_is_written_elsewhere(originals, tmp_path):
    """A file elsewhere is a hard link to one that the delta changes."""
    files = shutil.copytree(originals, tmp_path / "files")
    (files / "linked").hardlink_to(files / "program" / MOVIE)
    before = (files / "linked").read_bytes()
    apply(files / "delta")
    te.export.load(files / "made")
    assert (files / "linked").read_bytes() == before
    assert (files / "made" / MOVIE).read_bytes() != before


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_forgery_runs_or_opens_anything(tmp_path, step):
    """Each sixth forgery, or all; a process of its own, as an audit hook stays."""
    command = [sys.executable, "-m", "tests.export.forged_files", tmp_path, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, problems = json.loads(done.stdout)
    assert number > 200 // step and not problems
