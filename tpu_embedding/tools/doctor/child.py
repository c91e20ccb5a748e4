"""Answers one question about the devices, as a child process of the doctor.

The arguments are `devices`, `rows CASE BACKEND`, `sort`, or `time BACKEND PROFILE`.
"""

import json
import sys
from typing import Any

import jax

from tpu_embedding.tools.doctor.cases import run_case
from tpu_embedding.tools.doctor.examine import ANSWER
from tpu_embedding.tools.doctor.timings import check_sort, time_step


def main() -> None:
    question, *arguments = sys.argv[1:]
    functions = {
        "devices": describe_devices,
        "rows": run_case,
        "sort": check_sort,
        "time": time_step,
    }
    # By default, Python would write NaN, which other JSON readers reject.
    answer = json.dumps(functions[question](*arguments), allow_nan=False)
    print(f"{ANSWER}{answer}", flush=True)


def describe_devices() -> dict[str, Any]:
    """Describes all devices, and the memory of this host's devices."""
    # CPU devices, for example, have no statistics.
    memory = [(device.memory_stats() or {}) for device in jax.local_devices()]
    return {
        "platform": jax.default_backend(),
        "kinds": [device.device_kind for device in jax.devices()],
        "coords": [getattr(device, "coords", None) for device in jax.devices()],
        "processes": jax.process_count(),
        "memory": [stats.get("bytes_limit") for stats in memory],
    }


if __name__ == "__main__":
    main()
