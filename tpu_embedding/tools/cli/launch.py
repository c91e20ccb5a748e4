"""The command `tpu-embedding launch`."""

import argparse
import pathlib
from typing import Any

from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import UsageError, refuse_repeated
from tpu_embedding.tools.launch import (
    BACKENDS,
    PROGRAMS,
    Launch,
    Step,
    fetch_results,
    load_launch,
    print_steps,
    run_steps,
    what_deletes,
)
from tpu_embedding.tools.train.config.overrides import apply_overrides

_VERBS = {
    "create": "create the machines, after checks of config, zone and names",
    "setup": "install the package on all hosts",
    "run": "start a program on all hosts",
    "logs": "follow the log of the first host",
    "status": "show machines and jobs",
    "stop": "stop a program on all hosts",
    "fetch": "copy the results from the bucket",
    "delete": "delete the machines",
}


def add_launch(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "launch",
        allow_abbrev=False,
        help="train on TPUs of Google Cloud: create, set up, run, fetch, delete",
        description="Trains on TPUs of Google Cloud, by gcloud and kubectl. Each verb "
        "may be repeated: what exists already, and is as it should be, is left alone.",
        epilog="Exit status: 0 if all is done, 1 if a command failed or a resource "
        "differs, 2 if the launch file is wrong.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb, text in _VERBS.items():
        _add_verb(verbs, verb, text)


def _add_verb(verbs: Any, verb: str, text: str) -> None:
    parser = verbs.add_parser(verb, allow_abbrev=False, help=text, description=text)
    parser.set_defaults(run=_launch, verb=verb)
    parser.add_argument(
        "file", type=local_path, metavar="FILE", help="YAML file of the launch"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the launch, such as zone=us-east5-b",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every command, as a script for bash, and run none",
    )
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="print the traceback of an error, too",
    )
    if verb in ("run", "logs", "stop"):
        parser.add_argument(
            "--program",
            choices=PROGRAMS,
            default="train",
            help="train (the default), or doctor to check the hosts",
        )
    if verb == "run":
        parser.add_argument(
            "--resume",
            action="store_true",
            help="continue from the newest checkpoint of the run",
        )
    if verb == "create":
        parser.add_argument(
            "--skip-compile-check",
            action="store_true",
            help="do not compile the config for the slices first",
        )
    if verb == "fetch":
        parser.add_argument(
            "--to",
            type=local_path,
            metavar="DIR",
            help="local folder for the results; runs/NAME by default",
        )
    if verb == "delete":
        parser.add_argument(
            "--with-cluster", action="store_true", help="delete the GKE cluster, too"
        )


def _launch(parsed: argparse.Namespace) -> int:
    refuse_repeated("--set", parsed.set)
    try:
        launch = apply_overrides(load_launch(parsed.file), parsed.set)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    steps = _steps(launch, parsed)
    if parsed.verb == "fetch" and not parsed.dry_run:
        _results_dir(launch, parsed).mkdir(parents=True, exist_ok=True)
    if parsed.verb == "create":
        print(f"# {what_deletes(launch)}", flush=True)
    if parsed.dry_run:
        print_steps(steps)
    else:
        run_steps(steps, lambda line: print(line, flush=True))
    return 0


def _steps(launch: Launch, parsed: argparse.Namespace) -> tuple[Step, ...]:
    backend = BACKENDS[launch.backend]
    match parsed.verb:
        case "create":
            steps = backend.create(launch)
            return steps[1:] if parsed.skip_compile_check else steps
        case "setup":
            return backend.set_up(launch)
        case "run":
            if parsed.resume and parsed.program != "train":
                raise UsageError("--resume needs --program train.")
            options = ("--resume",) if parsed.resume else ()
            return backend.run(launch, parsed.program, options)
        case "logs":
            return backend.follow(launch, parsed.program)
        case "stop":
            return backend.stop(launch, parsed.program)
        case "fetch":
            return fetch_results(launch, str(_results_dir(launch, parsed)))
        case "delete" if parsed.with_cluster:
            if backend.delete_cluster is None:
                raise UsageError(f"--with-cluster: {launch.backend} has no cluster.")
            return (*backend.delete(launch), *backend.delete_cluster(launch))
        case "delete":
            return backend.delete(launch)
        case _:
            return backend.status(launch)


def _results_dir(launch: Launch, parsed: argparse.Namespace) -> pathlib.Path:
    return parsed.to or pathlib.Path("runs") / launch.name
