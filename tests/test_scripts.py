"""Each script explains itself with `--help`, and rejects unknown options."""

import importlib.util
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SHELL = sorted(
    path.name for path in (ROOT / "scripts").glob("*.sh") if path.name != "setup.sh"
)


def run(words, environment=None):
    return subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def no_python(tmp_path):
    """An environment in which a script that starts its work fails at once."""
    return {"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv"), "PYTHON": "false"}


@pytest.mark.parametrize("script", SHELL)
def test_help_of_a_shell_script(script, no_python):
    result = run(["bash", f"scripts/{script}", "--help"], no_python)
    assert result.returncode == 0, result.stderr
    assert f"scripts/{script}" in result.stdout
    assert result.stderr == ""
    assert not pathlib.Path(no_python["VENV"]).exists()


@pytest.mark.parametrize("script", ["test.sh", "check_wheel.sh", "docs.sh"])
def test_unknown_option_of_a_shell_script(script, no_python):
    result = run(["bash", f"scripts/{script}", "--al"], no_python)
    assert result.returncode == 2
    assert "--al" in result.stderr
    assert "--help" in result.stderr
    assert not pathlib.Path(no_python["VENV"]).exists()


def expanded(words):
    """Returns words after bash's expansion of braces."""
    return run(["bash", "-c", f"echo {words}"]).stdout.split()


def test_modules_and_tests_that_the_test_script_names():
    text = (ROOT / "scripts/test.sh").read_text().replace("\\\n", " ")
    (traced,) = re.findall(r"printf 'tpu_embedding\.%s,' (.*)\)\n", text)
    modules = [f"tpu_embedding.{name}" for name in expanded(traced)]
    assert len(modules) > 5
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    paths = expanded(" ".join(re.findall(r"\btests/[\w/{},.]+", text)))
    assert len(paths) > 5
    assert missing + [x for x in paths if not (ROOT / x).exists()] == []
