"""The README's program prints what it shows."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


def figures(text):
    return [float(figure) for figure in re.findall(r"\d+\.?\d*", text)]


def test_program_prints_what_the_page_shows(capsys):
    text = README.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    # One device, as on a laptop.
    with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("shard",))):
        exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.sub(r"[\d.]+", "", printed) == re.sub(r"[\d.]+", "", shown)
    # Sums are rounded in another order on another CPU.
    assert figures(printed) == pytest.approx(figures(shown), rel=0.05, abs=0.01)
