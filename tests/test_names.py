"""Global names that functions read exist, and folders name their files.

Linters leave undefined names alone, because shape strings look like some.
"""

import builtins
import dis
import importlib
import pathlib
import pkgutil
import re
import types

import pytest

import tpu_embedding

INFOS = [
    info
    for info in pkgutil.walk_packages(tpu_embedding.__path__, "tpu_embedding.")
    if not info.name.startswith("tpu_embedding.configs")
]
MODULES = [info.name for info in INFOS]
FOLDERS = [info.name for info in INFOS if info.ispkg]


def code_objects(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


@pytest.mark.parametrize("name", MODULES)
def test_global_names_exist(name):
    module = importlib.import_module(name)
    source = pathlib.Path(module.__file__).read_text()
    code = compile(source, module.__file__, "exec")
    read = {
        instruction.argval
        for each in code_objects(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname == "LOAD_GLOBAL"
    }
    assert not {x for x in read if not hasattr(module, x) and not hasattr(builtins, x)}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_docstring_of_a_folder_names_its_files(name):
    package = importlib.import_module(name)
    named = re.findall(r"^    .*|`.*?`", package.__doc__, re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(named)))
    files = {info.name for info in pkgutil.iter_modules(package.__path__)}
    assert not files - named - {"__main__"}
