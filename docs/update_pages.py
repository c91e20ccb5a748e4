"""Renews what pages repeat from Python files: tables of the API, and whole programs.

    python docs/update_pages.py

GitHub shows pages as they are. So a page of `docs/api` has a table of names after each
hidden `sphinx` block, which the site replaces with the whole reference. A page next to
a program, such as `docs/examples/resume.md`, shows the program without its docstring.
If it has several Python blocks, each of them keeps its first line.
"""

import argparse
import ast
import functools
import inspect
import json
import pathlib
import pkgutil
import re
import types
from typing import Any, Final

DOCS: Final = pathlib.Path(__file__).resolve().parent

_HIDDEN: Final = re.compile(
    r"^(<!-- sphinx\n(?:.*\n)*?-->\n)(?:\n(?:\|.*\n)+)?", re.MULTILINE
)
_DIRECTIVE: Final = re.compile(
    r"^\.\. ([\w:]+):: (\S+)\n((?: .*\n|\n(?= ))*)", re.MULTILINE
)
_PYTHON: Final = re.compile(r"(?<=^```python\n)(?:.*\n)*?(?=```$)", re.MULTILINE)
_LONGEST_DEFAULT: Final = 32


def find_pages() -> list[pathlib.Path]:
    """Returns the pages that repeat Python files."""
    programs = (path.with_suffix(".md") for path in (DOCS / "examples").glob("*.py"))
    return sorted([*(DOCS / "api").glob("*.md"), *programs])


def updated(page: pathlib.Path) -> str:
    """Returns the text of a page with tables or a program that match the files."""
    program = page.with_suffix(".py")
    if program.exists():
        return _with_program(page.read_text(), program.read_text())
    return _with_tables(page.read_text())


def _with_program(text: str, program: str) -> str:
    docstring = ast.parse(program).body[0]
    lines = program.splitlines(keepends=True)
    code = "".join(lines[docstring.end_lineno :]).strip() + "\n"
    later = [block.splitlines()[0] for block in _PYTHON.findall(text)[1:]]
    places = [0, *(code.index(f"\n{line}\n") for line in later), len(code)]
    parts = (code[a:b].strip() + "\n" for a, b in zip(places, places[1:], strict=False))
    return _PYTHON.sub(lambda _: next(parts), text)


def _with_tables(text: str) -> str:
    directives = _DIRECTIVE.findall(text)
    (name,) = (name for kind, name, _ in directives if kind.endswith("module"))
    module = pkgutil.resolve_name(name)

    def with_table(block: re.Match[str]) -> str:
        directives = _DIRECTIVE.findall(block[1])
        rows = [row for directive in directives for row in _rows(module, *directive)]
        head = "\n| name | description |\n|---|---|\n" if rows else ""
        return block[1] + head + "".join(rows)

    return _HIDDEN.sub(with_table, text)


def _rows(module: types.ModuleType, kind: str, name: str, options: str) -> list[str]:
    """Returns the lines of a table for one directive of autodoc."""
    if kind == "py:data":
        return [_row(name, " ".join(options.split()), _file_of_constant(name))]
    if kind.endswith("module"):
        hidden = _list_option(options, "exclude-members")
        names = _documented_names(module) if ":members:" in options else []
        return [_row_of(module, name) for name in sorted({*names} - {*hidden})]
    owner = getattr(module, name)
    members = _list_option(options, "members")
    if ":members:\n" in options:
        members = _documented_names(owner)
    return [_row_of(module, name), *(_row_of(owner, member) for member in members)]


def _list_option(options: str, name: str) -> list[str]:
    found = re.search(rf":{name}:(.*\n(?:      .*\n)*)", options)
    return re.findall(r"\w+", found[1]) if found else []


_PROPERTIES = property | functools.cached_property


def _documented_names(owner: Any) -> list[str]:
    """Returns the public functions, classes and properties, without fields."""
    fields = getattr(owner, "__dataclass_fields__", {})
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and name not in fields
        and (callable(value) or isinstance(value, _PROPERTIES | classmethod))
    ]


def _row_of(owner: Any, name: str) -> str:
    value = getattr(owner, name)
    content = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    if not isinstance(value, _PROPERTIES) and (signature := _signature_of(owner, name)):
        content += f"<br>`{signature}`"
    if isinstance(owner, type):
        name = f"{owner.__name__}.{name}"
    code: Any = value
    if isinstance(value, _PROPERTIES):
        code = value.fget if isinstance(value, property) else value.func
    return _row(name, content, inspect.getsourcefile(inspect.unwrap(code)))


def _row(name: str, content: str, file: str | None) -> str:
    path = pathlib.Path(str(file)).resolve().relative_to(DOCS.parent)
    content = content.replace("|", r"\|")
    return f"| [`{name}`](../../{path}) | {content} |\n"


def _signature_of(owner: Any, name: str) -> str:
    """Returns parameters and their defaults, without types."""
    function = getattr(owner, name)
    is_method = isinstance(inspect.getattr_static(owner, name), types.FunctionType)
    has_self = isinstance(owner, type) and is_method
    if isinstance(function, type):
        is_tuple, has_self = issubclass(function, tuple), True
        function = function.__new__ if is_tuple else function.__init__
        inherited = not getattr(function, "__module__", "").startswith("tpu_embedding")
        if inherited and not is_tuple:  # Errors, protocols, types of Flax variables.
            return ""
    parameters = inspect.signature(function).parameters
    # Decorated optimizers list the options that they share; undecorated, `**options`.
    own = inspect.signature(inspect.unwrap(function)).parameters
    shown = [
        parameter.replace(annotation=parameter.empty, default=_shown(parameter.default))
        for parameter in ({**own, **parameters}[key] for key in list(own)[has_self:])
        if not parameter.name.startswith("_")
    ]
    return f"{name}{inspect.Signature(shown)}"


class _Shown(str):
    """A text that is its own `repr`."""

    __repr__ = str.__str__


def _shown(default: Any) -> Any:
    """Returns a default as a signature shows it, on every version of Python and JAX."""
    if default is inspect.Parameter.empty:
        return default
    if isinstance(default, str):
        return _Shown(json.dumps(default))
    text = getattr(default, "__name__", repr(default))
    is_short = len(text) <= _LONGEST_DEFAULT and not text.startswith("<")
    return _Shown(text if is_short else "...")


def _file_of_constant(name: str) -> str:
    assignment = re.compile(rf"^{name}\b.*=", re.MULTILINE)
    files = sorted((DOCS.parent / "tpu_embedding").rglob("*.py"))
    return next(str(file) for file in files if assignment.search(file.read_text()))


if __name__ == "__main__":
    description = "Renews the tables and programs that pages repeat from Python files."
    argparse.ArgumentParser(description=description).parse_args()
    for page in find_pages():
        page.write_text(updated(page))
