"""All commands of a launch, those of probes included."""

from tests.tools.launch.recorded_launches import LAUNCHES, all_steps
from tpu_embedding.tools.launch.steps import Command, Do, OnHosts, Require


def commands_of(step):
    """Yields the commands of a step, with names for the hosts."""
    match step:
        case Do():
            if step.probe is not None:
                yield step.probe.command
            yield step.command
        case Require():
            yield step.probe.command
        case OnHosts():
            names = step.hosts
            if isinstance(names, Command):
                yield names
                names = tuple(f"host-{index}" for index in range(step.num_hosts))
            yield from step.commands(names)


def all_commands(program):
    """Returns every command of one program in all recorded launches, each once."""
    found = {
        command.argv: None
        for launch in LAUNCHES.values()
        for _, steps in all_steps(launch)
        for step in steps
        for command in commands_of(step)
        if command.argv[0] == program
    }
    return list(found)
