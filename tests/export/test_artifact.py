"""Directories of exports, which the processes of a job make together."""

import threading

import pytest

from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.export import ExportError, artifact, writing


@pytest.fixture
def local(monkeypatch):
    """Values of a thread, whose `job` is the one that the thread belongs to."""
    local = threading.local()
    for module in (artifact, writing):
        monkeypatch.setattr(module, "current_job", lambda: local.job)
    return local


def run_in_a_job(export, local):
    """Returns the errors of two processes, once both have called `export`."""

    def run(job):
        local.job = job
        export()

    return on_each(make_jobs(2), run)


def test_no_process_reads_tables_for_a_directory_that_is_refused(tmp_path, local):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    written = []
    for error in run_in_a_job(
        lambda: artifact.write_artifact(tmp_path / "full", written.append), local
    ):
        assert isinstance(error, ExportError)
        assert "must be a new directory, but it holds files" in str(error)
    assert written == []
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_error_of_writing_ends_the_export_on_all_processes(tmp_path, local):
    def write(writing):
        writing.do(lambda directory: (directory / "a" / "b").touch())

    first, second = run_in_a_job(
        lambda: artifact.write_artifact(tmp_path / "new", write), local
    )
    assert isinstance(first, FileNotFoundError)
    assert isinstance(second, ExportError)
    assert "could not write the export: FileNotFoundError" in str(second)
    assert list(tmp_path.iterdir()) == []
