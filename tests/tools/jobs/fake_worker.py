"""A worker that does what its arguments say, with the pulses of a real one.

    python -I fake_worker.py FOLDER SCRIPT [OPTIONS]

SCRIPT is JSON: a list of attempts, each a list of actions; see `act`. The last attempt
stands for all further ones. It runs without jax, so a test costs milliseconds. The
options are those of the worker; they are written to FOLDER/arguments-ATTEMPT.
"""

import importlib.util
import json
import os
import pathlib
import signal
import sys
import time

PULSES = pathlib.Path(__file__).parents[3] / "tpu_embedding/tools/jobs/pulses.py"


def load_pulses():
    spec = importlib.util.spec_from_file_location("pulses", PULSES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for_signals():
    while True:  # A signal just before `signal.pause` would not end it.
        time.sleep(0.01)


def act(action, folder, pulses):
    name, _, value = action.partition(":")
    match name:
        case "print":
            print(value)
        case "lines":
            for line in range(int(value)):
                print(f"{line:049d}")
        case "error":
            print(value, file=sys.stderr)
        case "tell":
            event, *values = value.split(",")
            pulses.send_event(event, *map(int, values))
        case "exit":
            sys.exit(int(value))
        case "kill":
            os.kill(os.getpid(), signal.Signals[value])
        case "abort":
            os.abort()
        case "touch":
            (folder / value).touch()
        case "wait":
            wait_for_signals()
        case "save":  # stops at SIGTERM, as a run does
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda n, _: sys.exit(130 if n == 2 else 75))
            (folder / "ready").touch()
            wait_for_signals()
        case _:
            raise ValueError(action)


def main():
    folder, *arguments = sys.argv[1:]
    folder = pathlib.Path(folder)
    script, options = arguments[0], arguments[1:]
    attempt = len(list(folder.glob("arguments-*")))
    (folder / f"arguments-{attempt}").write_text(json.dumps(options))
    (folder / "pid").write_text(str(os.getpid()))
    pulses = load_pulses()
    pulses.start_pulses()
    attempts = json.loads(script)
    for action in attempts[min(attempt, len(attempts) - 1)]:
        act(action, folder, pulses)


if __name__ == "__main__":
    main()
