"""Commands in shell blocks exist, with the options that they are given."""

import pathlib
import re
import shlex
import tomllib

import pytest

from tpu_embedding.tools.cli.command import parse
from tpu_embedding.tools.train import list_configs

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts),
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def shell_lines():
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if ">" in words:
                    words = words[: words.index(">")]
                if words:
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words)}")


@pytest.mark.parametrize("words", shell_lines())
def test_command_exists(words):
    words = words[sum("=" in word for word in words[:1]) :]  # a variable of the shell
    if words[0] == "tpu-embedding":
        check_cli(words[1:])
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        if words[1] == "scripts/train.sh":
            check_cli(["train", *words[2:]])
    elif words[0] == "python" and words[1].endswith(".py"):
        source = (ROOT / words[1]).read_text()
        for option in (word for word in words[2:] if word.startswith("--")):
            assert f'"{option}"' in source, option
    elif words[:2] == ["pip", "install"]:
        for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
            assert set(extra.split(",")) <= EXTRAS.keys()


def check_cli(words):
    if "--help" not in words and "--version" not in words:
        config = getattr(parse(words), "config", None)  # tyro checks the options
        known = config is None or config in list_configs()
        assert known or config.startswith("runs/") or "." in config, config
