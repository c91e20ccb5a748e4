"""Steps that set up and run programs on machines by SSH, for two of the backends.

The backends differ in how they name machines and reach them; they pass both.
"""

import dataclasses
import shlex

from tpu_embedding.tools.launch.common_steps import upload_files, upload_scripts
from tpu_embedding.tools.launch.programs import (
    Program,
    program_arguments,
    requirement,
    verdict_dir,
)
from tpu_embedding.tools.launch.settings import Launch
from tpu_embedding.tools.launch.steps import Command, OnHosts, Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shells:
    """A way to run a shell command on machines.

    Attributes:
      hosts: names of the machines, or of groups of them, or a command that prints them.
      num_hosts: number of the names.
      ssh: gcloud's command without `--command`; it has the placeholder `{host}`.
      ssh_first: the same for one machine, to follow its log.
    """

    hosts: tuple[str, ...] | Command
    num_hosts: int
    ssh: Command
    ssh_first: Command

    def on_all(self, purpose: str, command: str) -> Step:
        """Returns the step that runs a shell command on all machines.

        Args:
          purpose: what it is for.
          command: the shell command, which may have placeholders.
        """
        return self._step(purpose, self.ssh, command, first=False)

    def on_first(self, purpose: str, command: str) -> Step:
        """Returns the step that runs a shell command on one machine; see `on_all`."""
        return self._step(purpose, self.ssh_first, command, first=True)

    def _step(self, purpose: str, ssh: Command, command: str, *, first: bool) -> Step:
        return OnHosts(
            purpose,
            self.hosts,
            Command((*ssh.argv, f"--command={command}")),
            self.num_hosts,
            "first" if first else "all",
        )


def set_up(launch: Launch, shells: Shells) -> tuple[Step, ...]:
    """Returns the steps that mount the bucket and install the package on all machines.

    Args:
      launch: the launch.
      shells: a way to reach the machines.
    """
    script = _script(launch, "setup_host.sh", launch.bucket, requirement(launch))
    return (
        *upload_files(launch),
        *upload_scripts(launch),
        # Makes gcloud create its SSH key once, before it is needed many times.
        shells.on_first("reach a host", "true"),
        shells.on_all("install the package on all hosts", script),
    )


def run(
    launch: Launch, shells: Shells, program: Program, options: tuple[str, ...]
) -> tuple[Step, ...]:
    """Returns the steps that start a program on all machines.

    Args:
      launch: the launch.
      shells: a way to reach the machines.
      program: the program.
      options: further options of the program, which may have placeholders.
    """
    if program == "train" and launch.restarts:
        options = (*options, "--restarts", str(launch.restarts))
    arguments = program_arguments(launch, program, *options)
    script = _script(launch, "run_host.sh", verdict_dir(launch), *arguments)
    return (shells.on_all(f"start {program} on all hosts", script),)


def follow(shells: Shells, program: Program) -> tuple[Step, ...]:
    """Returns the step that shows the log of the first machine, until Ctrl-C.

    Args:
      shells: a way to reach the machines.
      program: the program.
    """
    command = f"tail --lines=+1 --follow tpu_embedding_{program}.log"
    return (shells.on_first("follow the log of the first host", command),)


def stop(launch: Launch, shells: Shells, program: Program) -> tuple[Step, ...]:
    """Returns the step that stops a program on all machines.

    Args:
      launch: the launch.
      shells: a way to reach the machines.
      program: the program.
    """
    script = _script(launch, "stop_host.sh", program)
    return (shells.on_all(f"stop {program} on all hosts", script),)


def _script(launch: Launch, name: str, *arguments: str) -> str:
    """Returns the shell command that runs an uploaded script."""
    url = f"{launch.folder_url}/launch/{name}"
    return f"gcloud storage cat {url} | bash -s -- {shlex.join(arguments)}"
