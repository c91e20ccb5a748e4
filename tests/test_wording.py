"""Texts and names of the package are plain: the checks that a program can make."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tpu_embedding", "benchmarks", "configs", "scripts", "docs")
    for path in (ROOT / folder).rglob("*.py")
)

OPENINGS = ("What", "Whether", "How", "Which")
ENTRY_WITHOUT_NOUN = re.compile(r"^\s+\w+: (of|as|its|for|that)\b")

# Names that the package had and readers could not guess, with those that it has now.
OLD_NAMES = {
    "among": "table_rows_context",
    "Last": "MustBeLast",
    "FEWEST_IDS": "ID_ALIGNMENT",
    "on_their_way": "buffer_layout",
    "runner": "backend",
    "Runner": "KernelBackend",
    "row_workers": "kernel_bodies",
    "distance": "row_stride",
    "NOWHERE": "DROPPED_ROW",
    "_Parts": "TracedRule",
    "RowRule": "KernelBody",
    "KernelRule": "LoweredRule",
    "kernel_rule": "lower_to_kernel",
    "Uses": "IdsByRow",
    "Bags": "PoolingSpec",
    "Remaining": "PendingRounds",
    "LaterUpdates": "DeferredGradient",
    "RowSums": "PackedRowGradients",
    "for_each_id": "broadcast_to_ids",
    "hold": "forward_fill",
    "logical_values": "unstack_tables",
    "with_logical_values": "with_table_values",
    "place_batch": "shard_batch",
    "LookupStatistics": "LookupStatsVariable",
    "settle": "constrain_first_axis",
    "rows_abreast": "places_per_line",
}
OLD_PREFIXES = re.compile(r"_?(MOST|FEWEST)_")


@functools.cache
def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def docstrings(file):
    """Yields line and text of each docstring, those of constants included."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value


def names(file):
    """Yields line and name of what the file defines, imports and assigns."""
    for node in ast.walk(parse(file)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield node.lineno, alias.asname or alias.name


def test_no_docstring_opens_with_a_question_word():
    wrong = [
        f"{file}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(file)
        if text.split()[:1] and text.split()[0] in OPENINGS
    ]
    assert not wrong, "say what it is, or does, instead:\n" + "\n".join(wrong)


def test_entries_of_docstrings_stand_alone():
    wrong = [
        f"{file}:{line}: {entry.strip()}"
        for file in FILES
        if file.startswith("tpu_embedding/")
        for line, text in docstrings(file)
        for entry in text.splitlines()
        if ENTRY_WITHOUT_NOUN.match(entry)
    ]
    assert not wrong, "name the thing: 'plan: plan of the layer':\n" + "\n".join(wrong)


def test_no_old_name_is_back():
    wrong = [
        f"{file}:{line}: {name}; use {OLD_NAMES.get(name, '_MAX_...')}"
        for file in FILES
        for line, name in names(file)
        if name in OLD_NAMES or OLD_PREFIXES.match(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_checks_see_names_and_docstrings():
    file = "tpu_embedding/types.py"
    assert any(name == "PADDING_ROW_ID" for _, name in names(file))
    assert len(list(docstrings(file))) > 5
