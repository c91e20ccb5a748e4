"""The three ways to get TPU machines, behind one interface."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from tpu_embedding.tools.launch import compute_engine, gke, queued_resource
from tpu_embedding.tools.launch.programs import Program
from tpu_embedding.tools.launch.settings import Launch
from tpu_embedding.tools.launch.slices import BackendName
from tpu_embedding.tools.launch.steps import Step

Steps = tuple[Step, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Pure functions from a launch to the steps of each verb.

    Attributes:
      create: creates the machines, after checks.
      set_up: installs the package.
      run: starts a program on all hosts, with further options.
      follow: shows the log of the first host.
      status: shows machines and jobs.
      stop: stops a program.
      delete: deletes the machines.
      delete_cluster: deletes what holds the machines and is shared; None if nothing is.
    """

    create: Callable[[Launch], Steps]
    set_up: Callable[[Launch], Steps]
    run: Callable[[Launch, Program, tuple[str, ...]], Steps]
    follow: Callable[[Launch, Program], Steps]
    status: Callable[[Launch], Steps]
    stop: Callable[[Launch, Program], Steps]
    delete: Callable[[Launch], Steps]
    delete_cluster: Callable[[Launch], Steps] | None = None


BACKENDS: Final[Mapping[BackendName, Backend]] = {
    "gke": Backend(
        create=gke.create,
        set_up=gke.set_up,
        run=gke.run,
        follow=gke.follow,
        status=gke.status,
        stop=gke.stop,
        delete=gke.delete,
        delete_cluster=gke.delete_cluster,
    ),
    "compute_engine": Backend(
        create=compute_engine.create,
        set_up=compute_engine.set_up,
        run=compute_engine.run,
        follow=compute_engine.follow,
        status=compute_engine.status,
        stop=compute_engine.stop,
        delete=compute_engine.delete,
    ),
    "queued_resource": Backend(
        create=queued_resource.create,
        set_up=queued_resource.set_up,
        run=queued_resource.run,
        follow=queued_resource.follow,
        status=queued_resource.status,
        stop=queued_resource.stop,
        delete=queued_resource.delete,
    ),
}
