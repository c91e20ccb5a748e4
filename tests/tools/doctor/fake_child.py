"""A child of the doctor without devices: each argument is a case and what it does.

python fake_child.py read:ok update:hang "speed/write, dim 8:ratio=0.5" ...

A case that names a part runs in that part only, and not for XLA.
"""

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading

PROTOCOL = pathlib.Path(__file__).parents[3] / "tpu_embedding/tools/doctor/protocol.py"


def load_protocol():
    """Loads the protocol's file alone: the package would import JAX, for seconds."""
    spec = importlib.util.spec_from_file_location("protocol", PROTOCOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["protocol"] = module
    spec.loader.exec_module(module)
    return module


protocol = load_protocol()


def capability_of(case: str) -> str:
    return case if ", dim" in case or "exchange" in case else f"{case}, dim 8"


def run(case: str, deed: str) -> None:
    capability = capability_of(case)
    protocol.emit(protocol.CaseStarted(case=case, capability=capability))
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
            capability=capability,
            ok=not is_wrong,
            problem="row 7 is zero" if is_wrong else None,
            seconds=0.25,
            figures=figures_of(deed),
        )
    )


def figures_of(deed: str) -> dict[str, float | None]:
    if not deed.startswith("ratio="):
        return {}
    ratio = float(deed.removeprefix("ratio="))
    figures = {"seconds_per_call": 2e-3, "xla_seconds_per_call": 2e-3 * ratio}
    return {**figures, "speed_ratio": ratio, "bytes": 1e6, "model_bytes": 4e6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--skip-until-after")
    for option in ("--backend", "--part", "--tier", "--seeds"):
        parser.add_argument(option)
    parsed = parser.parse_args()
    part = None if parsed.backend == "xla" else parsed.part
    cases = []
    for text in parsed.cases:
        of_part, _, case = text.rpartition("/")
        if of_part in ("", part):
            cases.append(case.split(":"))
    names = [name for name, _ in cases]
    real = [name for name in names if name != "start"]
    if "start" not in names[:1]:
        protocol.emit(
            protocol.Planned(capabilities={n: capability_of(n) for n in real})
        )
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
