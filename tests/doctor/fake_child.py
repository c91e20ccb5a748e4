"""A child of the doctor without devices: each argument is a case and what it does.

python fake_child.py read:ok update:hang write:crash ...
"""

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading

PROTOCOL = pathlib.Path(__file__).parents[2] / "tpu_embedding/doctor/protocol.py"


def load_protocol():
    """Loads the protocol's file alone: the package would import JAX, for seconds."""
    spec = importlib.util.spec_from_file_location("protocol", PROTOCOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["protocol"] = module
    spec.loader.exec_module(module)
    return module


protocol = load_protocol()


def run(case: str, deed: str) -> None:
    protocol.emit(protocol.CaseStarted(case=case, capability=f"{case}, dim 8"))
    if deed == "hang":
        threading.Event().wait()
    if deed == "hang_with_child":
        # The grandchild holds the output open, as a helper of a library may.
        subprocess.Popen(
            [sys.executable, "-c", "import threading as t; t.Event().wait()"]
        )
        threading.Event().wait()
    if deed == "noise":
        while True:
            print("noise", flush=True)
    if deed == "abort":
        print("F0000 Check failed: the chip has halted", file=sys.stderr, flush=True)
        os.abort()
    if deed == "segfault":
        signal.raise_signal(signal.SIGSEGV)
    if deed == "exit":
        print("RuntimeError: no TPU left", file=sys.stderr, flush=True)
        os._exit(3)
    print("WARNING: a library says hello", flush=True)
    is_wrong = deed == "wrong"
    protocol.emit(
        protocol.CaseEnded(
            case=case,
            capability=f"{case}, dim 8",
            ok=not is_wrong,
            problem="row 7 is zero" if is_wrong else None,
            seconds=0.25,
            figures={"speed_ratio": 2.0},
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--skip-until-after")
    parsed = parser.parse_args()
    cases = [case.split(":") for case in parsed.cases]
    names = [name for name, _ in cases]
    if parsed.skip_until_after is not None:
        cases = cases[names.index(parsed.skip_until_after) + 1 :]
    for name, deed in cases:
        if name == "start":
            print(f"ValueError: {deed}", file=sys.stderr, flush=True)
            os._exit(1)
        run(name, deed)
    protocol.emit(protocol.AllDone())


if __name__ == "__main__":
    main()
