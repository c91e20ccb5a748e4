"""The steps of a launch, as values: commands, and how to tell that one has been done.

Backends turn a `Launch` into steps by pure functions. `runner` executes or prints them.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any, Final, Literal

HOST: Final = "{host}"
FIRST_HOST: Final = "{first_host}"
NUM_HOSTS: Final = "{num_hosts}"
HOST_INDEX: Final = "{host_index}"
"""Placeholders in the command of `OnHosts`."""

_WAIT: Final = 'for job in $(jobs -p); do wait "$job"; done'
"""Waits for all hosts; unlike a plain `wait`, it fails where `set -e` holds."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A program with its arguments, and the text that it reads.

    Attributes:
      argv: program and arguments.
      stdin: text for its standard input, or "".
    """

    argv: tuple[str, ...]
    stdin: str = ""

    def as_shell(self) -> str:
        """Returns the command as a line for a POSIX shell, quoted where needed.

        Example:
          >>> print(Command(("echo", "a b")).as_shell())
          echo 'a b'
        """
        line = shlex.join(self.argv)
        if not self.stdin:
            return line
        return f"{line} <<'END_OF_INPUT'\n{self.stdin.rstrip()}\nEND_OF_INPUT"


@dataclasses.dataclass(frozen=True)
class Expected:
    """A value that a resource must have.

    Attributes:
      path: path of the value in the JSON of the resource, such as `"config.spot"`.
      value: the value as text; `"missing"` is that of a path that does not exist. Of a
        URL, only the last part counts. `"false"` is also right for a missing path.
    """

    path: str
    value: str

    def problem(self, resource: Mapping[str, Any]) -> str:
        """Returns how a resource differs, or "".

        Args:
          resource: JSON of the resource.

        Example:
          >>> Expected("spec.size", "4").problem({"spec": {"size": 8}})
          'spec.size is 8, not 4'
        """
        found: Any = resource
        for part in self.path.split("."):
            if isinstance(found, list):
                found = found[0] if found else None
            found = found.get(part) if isinstance(found, Mapping) else None
        text = {None: "missing", True: "true", False: "false"}.get(found, str(found))
        if text.rpartition("/")[2] == self.value:
            return ""
        if found is None and self.value == "false":
            return ""
        return f"{self.path} is {text}, not {self.value}"


@dataclasses.dataclass(frozen=True)
class Probe:
    """A command that describes a resource as JSON, or fails as it does not exist.

    Attributes:
      resource: the resource in words, for messages.
      command: the command.
      expected: values that the resource must have.
      way_out: what the user can do if it has others.
    """

    resource: str
    command: Command
    expected: tuple[Expected, ...] = ()
    way_out: str = "delete it, or choose another name"


RunsIf = Literal["always", "missing", "exists"]


@dataclasses.dataclass(frozen=True)
class Do:
    """Runs a command, unless a probe says that there is nothing to do.

    Attributes:
      purpose: what the command is for, in the infinitive.
      command: the command. With `runs_if="always"`, it may be repeated safely.
      runs_if: `"missing"` runs it where the probe finds no resource, and refuses a
        resource that differs. `"exists"` runs it where the probe finds one.
      probe: the probe; None with `runs_if="always"`.
    """

    purpose: str
    command: Command
    runs_if: RunsIf = "always"
    probe: Probe | None = None


@dataclasses.dataclass(frozen=True)
class Require:
    """Stops the launch, unless a resource exists and has the expected values.

    Attributes:
      purpose: what is checked, in the infinitive.
      probe: the probe.
      way_out: what the user can do.
    """

    purpose: str
    probe: Probe
    way_out: str


@dataclasses.dataclass(frozen=True)
class OnHosts:
    """Runs a command for several hosts at the same time.

    Attributes:
      purpose: what the command is for, in the infinitive.
      hosts: names of the hosts, or a command that prints them, one a line.
      command: the command, with placeholders.
      num_hosts: number of names that there must be.
      which: `"all"` hosts, or the `"first"` in alphabetical order.
    """

    purpose: str
    hosts: tuple[str, ...] | Command
    command: Command
    num_hosts: int
    which: Literal["all", "first"] = "all"

    def commands(self, hosts: tuple[str, ...]) -> tuple[Command, ...]:
        """Returns the command of each host.

        Args:
          hosts: names of all hosts.
        """
        hosts = tuple(sorted(hosts))
        chosen = hosts[:1] if self.which == "first" else hosts
        return tuple(
            Command(
                tuple(
                    _fill(
                        argument,
                        {
                            HOST: host,
                            FIRST_HOST: hosts[0],
                            NUM_HOSTS: str(len(hosts)),
                            HOST_INDEX: str(index),
                        },
                    )
                    for argument in self.command.argv
                )
            )
            for index, host in enumerate(chosen)
        )

    def as_shell(self) -> str:
        """Returns a loop for bash that does the same."""
        line = _fill(
            self.command.as_shell(),
            {
                HOST: "'\"${hosts[$index]}\"'",
                FIRST_HOST: "'\"${hosts[0]}\"'",
                NUM_HOSTS: "'\"${#hosts[@]}\"'",
                HOST_INDEX: "'\"$index\"'",
            },
        )
        if isinstance(self.hosts, Command):
            listed = f"mapfile -t hosts < <({self.hosts.as_shell()} | sort)"
        else:
            listed = f"hosts=({shlex.join(sorted(self.hosts))})"
        if self.which == "first":
            return f"{listed}\nindex=0\n{line}"
        loop = 'for index in "${!hosts[@]}"; do'
        return f"{listed}\n{loop}\n  {line} &\ndone\n{_WAIT}"


Step = Do | Require | OnHosts


def _fill(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def gcloud(*arguments: str, project: str, **flags: str | bool | None) -> Command:
    """Returns a command of gcloud.

    Args:
      *arguments: command group, command and positional arguments.
      project: id of the project.
      **flags: flags, with `_` for `-`; True is a flag without a value, and None or
        False leaves the flag out.

    Example:
      >>> gcloud("compute", "zones", "list", project="p", quiet=True).as_shell()
      'gcloud compute zones list --project=p --quiet'
    """
    return Command(("gcloud", *arguments, *_flags({"project": project} | flags)))


def kubectl(
    *arguments: str, context: str, stdin: str = "", **flags: str | bool | None
) -> Command:
    """Returns a command of kubectl; see `gcloud`.

    Args:
      *arguments: command and positional arguments.
      context: context of kubectl's configuration, which names the cluster.
      stdin: text for its standard input.
      **flags: flags, as for `gcloud`.
    """
    return Command(
        ("kubectl", *arguments, *_flags({"context": context} | flags)), stdin
    )


def _flags(flags: Mapping[str, str | bool | None]) -> tuple[str, ...]:
    words = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        words.append(flag if value is True else f"{flag}={value}")
    return tuple(words)
