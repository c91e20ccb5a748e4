"""The pictures in docs/ are what their script draws."""

import importlib.util
import pathlib

import pytest

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"


def load_script():
    specification = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


DRAWINGS = load_script().PICTURES


@pytest.mark.parametrize("name", DRAWINGS)
def test_picture_is_as_drawn(name):
    assert (PICTURES / name).read_text() == DRAWINGS[name]()
