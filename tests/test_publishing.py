"""The files by which the project is published agree with pyproject.toml."""

import importlib.metadata
import pathlib
import tomllib

import yaml

import tpu_embedding as te

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text())


def commands(node):
    """Yields each shell command of a job of the workflow, or of Read the Docs."""
    if isinstance(node, dict):
        for value in node.values():
            yield from commands(value)
    elif isinstance(node, list):
        for value in node:
            yield from commands(value)
    elif isinstance(node, str) and node.startswith("bash "):
        yield node


def test_the_citation_agrees_with_the_project():
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])
    # The version stands in one place, pyproject.toml.
    assert "version" not in citation


def test_the_version_is_that_of_the_project():
    assert te.__version__ == importlib.metadata.version("tpu-embedding")
    assert te.__version__ == PROJECT["version"]


def test_every_dependency_has_a_lower_bound():
    """`scripts/test.sh --all` tests those that are not behind an accelerator."""
    extras = PROJECT["optional-dependencies"]
    of_jax = {"jax[tpu]", "jax[cuda12]"}
    for name in [*PROJECT["dependencies"], *(x for e in extras.values() for x in e)]:
        assert ">=" in name or name in of_jax, name


def test_the_workflow_calls_the_scripts_of_the_project():
    workflow = read_yaml(".github/workflows/tests.yml")
    for name, job in workflow["jobs"].items():
        found = list(commands(job["steps"]))
        assert found, name
        for command in found:
            assert (ROOT / command.split()[1]).is_file(), command
    matrix = workflow["jobs"]["quick"]["strategy"]["matrix"]["include"]
    versions = [entry["python"] for entry in matrix]
    assert versions == ["3.11", "3.12"]
    listed = {x.rpartition(" :: ")[2] for x in PROJECT["classifiers"]}
    assert set(versions) <= listed
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_read_the_docs_calls_the_script_of_the_project():
    config = read_yaml(".readthedocs.yaml")
    assert list(commands(config["build"])) == ["bash scripts/docs.sh"]
    assert config["build"]["tools"]["python"] in {"3.11", "3.12"}
