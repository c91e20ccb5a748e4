"""Public docstrings are complete and have an example."""

import ast
import functools
import inspect
import json
import pathlib
import re
import subprocess
import sys

import tpu_embedding as te
from tpu_embedding.tools import compile_report, train

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = [
    te,
    *filter(inspect.ismodule, (getattr(te, name) for name in te.__all__)),
    train,
    compile_report,
]


def exported(module):
    """Yields a module's public functions and classes, without constants and types."""
    for name in getattr(module, "__all__", vars(module)):
        value = inspect.unwrap(getattr(module, name))
        is_code = inspect.isclass(value) or inspect.isfunction(value)
        if not name.startswith("_") and is_code:
            yield value


def place(value):
    """Where a class or function is: (file, qualified name)."""
    # `inspect` looks in `__module__`, which a class may set to the module that exports
    # it. Methods remember their file, except the ones that `dataclass` generates.
    members = vars(value).values() if inspect.isclass(value) else ()
    files = [x.__code__.co_filename for x in members if inspect.isfunction(x)]
    own = (file for file in files if file.startswith(str(ROOT / "tpu_embedding")))
    file = next(own, None) or inspect.getsourcefile(value)
    return pathlib.Path(file).resolve(), value.__qualname__


EXPORTED = {
    place(value): value
    for module in MODULES
    for value in exported(module)
    if value.__module__.startswith("tpu_embedding")
}


def public_places():
    """Yields the places of all exported values and their methods."""
    for value in EXPORTED.values():
        yield place(value)
        for owner in value.__mro__ if inspect.isclass(value) else ():
            for member in vars(owner).values():
                code = getattr(member, "fget", getattr(member, "__func__", member))
                code = inspect.unwrap(getattr(code, "func", code))
                name = getattr(code, "__name__", "_")
                is_public = name[0] != "_" or name in ("__init__", "__call__")
                if inspect.isfunction(code) and is_public:
                    file = inspect.getsourcefile(code)
                    if file and ROOT in pathlib.Path(file).parents:
                        yield place(code)


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def definitions(path):
    """The definitions of a file: (first line, last line of the docstring, name)."""

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFINITIONS):
                name = f"{prefix}{child.name}"
                last = child.body[0].end_lineno if ast.get_docstring(child) else None
                found.append((child.lineno, last or child.body[0].lineno, name))
                visit(child, f"{name}.")

    found = []
    visit(ast.parse(path.read_text()), "")
    return found


def test_public_docstrings_follow_the_style():
    """Runs ruff's D rules, which the project's own settings leave out for all names."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json"]
    rules = ["--select", "D", "--ignore", "D105,D107"]
    run = subprocess.run(
        [*command, *rules, "tpu_embedding"], cwd=ROOT, capture_output=True, text=True
    )
    public = {*public_places()}
    assert len(public) > 300
    problems = []
    for problem in json.loads(run.stdout):
        path = pathlib.Path(problem["filename"]).resolve()
        line = problem["location"]["row"]
        names = [name for a, b, name in definitions(path) if a <= line <= b]
        if names and (path, names[-1]) in public:
            problems.append((path, names[-1], problem["code"], problem["message"]))
    assert problems == []


def test_public_docstrings_have_an_example():
    texts = {name: inspect.getdoc(value) or "" for name, value in EXPORTED.items()}
    assert len(texts) > 200
    assert [x for x, text in texts.items() if not re.search(r">>> |::\n", text)] == []
