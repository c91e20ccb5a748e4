"""Versions and variables: each variable that hides a TPU is found on a TPU host."""

import os
import subprocess
import sys

import pytest

from tpu_embedding.kernel_verdicts import installed_version
from tpu_embedding.tools.doctor.environment import (
    check_variables,
    check_versions,
    user_environment,
)

CHIPS = ["/dev/accel0"]
CLOBBERED = {
    "TPU_SKIP_MDS_QUERY": ("1", "failed", "metadata server"),
    "JAX_PLATFORMS": ("cpu", "failed", "hides the TPU"),
    "JAX_PLATFORM_NAME": ("cpu", "failed", "hides the TPU"),
    "ALLOW_MULTIPLE_LIBTPU_LOAD": ("1", "warning", "two processes"),
    "TPU_VISIBLE_DEVICES": ("0", "warning", "hides all other chips"),
    "TPU_VISIBLE_CHIPS": ("0,1", "warning", "hides all other chips"),
    "TPU_PROCESS_BOUNDS": ("1,1,1", "warning", "grid of processes"),
    "TPU_CHIPS_PER_PROCESS_BOUNDS": ("2,2,1", "warning", "chips that a process takes"),
    "TPU_LIBRARY_PATH": ("/a/libtpu.so", "warning", "another libtpu"),
    "LIBTPU_INIT_ARGS": ("--a=1", "warning", "options of libtpu"),
    "XLA_FLAGS": ("--b=1", "warning", "options of the compiler"),
}


@pytest.mark.parametrize("name", CLOBBERED)
def test_clobbered_variables(name):
    value, status, text = CLOBBERED[name]
    (finding,) = check_variables({name: value}, device_files=CHIPS)
    assert finding.status == status
    assert text in finding.text and f"{name}={value}" in finding.text
    assert finding.way_out and "nset" in finding.way_out
    (finding,) = check_variables({name: value}, device_files=[])
    assert finding.status == "ok" and "no TPU chips" in finding.text


HARMLESS = [
    {},
    {"TPU_SKIP_MDS_QUERY": "0"},
    {"TPU_SKIP_MDS_QUERY": ""},
    {"ALLOW_MULTIPLE_LIBTPU_LOAD": "false"},
    {"JAX_PLATFORMS": "tpu,cpu"},
]


@pytest.mark.parametrize("variables", HARMLESS)
def test_harmless_variables(variables):
    (finding,) = check_variables(variables, device_files=CHIPS)
    assert finding.status == "ok"


MEGASCALE = {
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}


@pytest.mark.parametrize("chips", [CHIPS, []])
@pytest.mark.parametrize("name", [None, *MEGASCALE])
@pytest.mark.parametrize("is_alone", [True, False])
def test_variables_of_several_slices(chips, name, is_alone):
    """All three are right in a job of several slices; one or two of them are not."""
    is_kept = [key for key in MEGASCALE if name is None or (key == name) == is_alone]
    variables = {key: MEGASCALE[key] for key in is_kept} | {"OTHER": "1"}
    (finding,) = check_variables(variables, device_files=chips)
    assert finding.status == ("warning" if name is None else "failed")
    assert "waits for other slices" in finding.text
    for key, value in MEGASCALE.items():
        shown = f"{key}={value}" in finding.text
        assert shown == (key in is_kept)
    assert ("missing" in finding.text) == (name is not None)
    assert finding.way_out and f"unset {' '.join(MEGASCALE)}" in finding.way_out


REQUIREMENTS = {
    # Requirement of jax on libtpu, given the installed version; True: it is met.
    "the installed one": ('libtpu=={installed}; extra == "tpu"', True),
    "any patch": ('libtpu=={major}.*; extra == "tpu"', True),
    "another": ('libtpu==99.1.*; extra == "tpu"', False),
    "of something else": ('libtpu-nightly==99.1.*; extra == "tpu"', True),
}


@pytest.mark.parametrize("case", REQUIREMENTS)
def test_libtpu_is_the_one_that_jax_needs(case):
    requirement, is_met = REQUIREMENTS[case]
    installed = installed_version("libtpu")
    if installed is None:
        pytest.skip("libtpu is not installed")
    major = installed.partition(".")[0]
    listed, *failed = check_versions(
        [requirement.format(installed=installed, major=major)]
    )
    assert f"libtpu {installed}" in listed.text
    assert [finding.status for finding in failed] == ([] if is_met else ["failed"])
    assert all("99.1.*" in finding.text and finding.way_out for finding in failed)


def test_the_installed_versions_match():
    assert all(finding.status == "ok" for finding in check_versions())


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs /proc")
def test_variables_that_jax_sets_are_not_the_users():
    code = (
        "import jax, os;"
        "from tpu_embedding.tools.doctor.environment import user_environment;"
        "os.environ['TPU_SKIP_MDS_QUERY'] = 'by JAX'; os.environ['OTHER'] = 'ours';"
        "found = user_environment();"
        "print(found.get('TPU_SKIP_MDS_QUERY'), found['OTHER'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TPU_SKIP_MDS_QUERY"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    for given, expected in ((None, "None ours"), ("0", "0 ours")):
        variables = environment | (
            {} if given is None else {"TPU_SKIP_MDS_QUERY": given}
        )
        output = subprocess.check_output(
            [sys.executable, "-c", code], env=variables, text=True, timeout=120
        )
        assert output.strip() == expected


def test_the_users_environment_holds_the_rest(monkeypatch):
    monkeypatch.setenv("A_VARIABLE", "a value")
    assert user_environment()["A_VARIABLE"] == "a value"
