"""A child of the doctor without devices: each argument is a case and its deed.

python fake_child.py "read, dim 32:hang" "step, dim 32:wrong" ...

All other cases pass, and their kernels have 1.5 times the speed of XLA. The deed of
"start" is done before the first question.
"""

import json
import os
import signal
import subprocess
import sys
import threading

WAIT = "import threading as t; t.Event().wait()"


def result_of(case: dict, deed: str) -> dict:
    result = {"case": case["name"]}
    if deed == "wrong":
        return result | {"problem": "row 7 is zero"}
    if deed == "wrong by xla":
        return result | {"xla_problem": "row 7 is zero"}
    ratio = float(deed.removeprefix("ratio=")) if deed.startswith("ratio=") else 1.5
    if case["scope"] == "all kernels":
        return result
    times = {"seconds_per_call": 2e-3, "xla_seconds_per_call": 2e-3 * ratio}
    return result | times | {"speed_ratio": ratio}


def do(deed: str) -> None:
    """Does a deed after which no answer comes; others do nothing here."""
    if deed == "hang_with_child":
        # The grandchild holds the output open, as a helper of a library may.
        subprocess.Popen([sys.executable, "-c", WAIT])
    if deed.startswith("hang"):
        threading.Event().wait()
    if deed == "abort":
        print("F0000 Check failed: the chip has halted", file=sys.stderr, flush=True)
        os.abort()
    if deed == "segfault":
        signal.raise_signal(signal.SIGSEGV)
    if deed == "exit":
        print("RuntimeError: no TPU left", file=sys.stderr, flush=True)
        os._exit(3)


def main() -> None:
    deeds = dict(argument.rsplit(":", 1) for argument in sys.argv[1:])
    do(deeds.get("start", "ok"))
    for line in sys.stdin:
        case = json.loads(line)["case"]
        deed = deeds.get(case["name"], "ok")
        do(deed)
        print("WARNING: a library says hello", flush=True)
        print(json.dumps(result_of(case, deed)), flush=True)


if __name__ == "__main__":
    main()
