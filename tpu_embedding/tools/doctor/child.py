"""The doctor's child program, which answers a question about the devices.

The arguments are `devices`, or `rows CASE BACKEND`. The last line of the output is the
answer in JSON.
"""

import json
import sys
from typing import Any

import jax

from tpu_embedding.tools.doctor.cases import run_case


def main() -> None:
    """Prints the answer to the question on the command line."""
    question, *arguments = sys.argv[1:]
    answer = describe_devices() if question == "devices" else run_case(*arguments)
    print(json.dumps(answer))


def describe_devices() -> dict[str, Any]:
    """Returns the platform, all devices' kinds, and this host's device memory."""
    memory = [(device.memory_stats() or {}) for device in jax.local_devices()]
    return {
        "platform": jax.default_backend(),
        "kinds": [device.device_kind for device in jax.devices()],
        "memory": [stats.get("bytes_limit") for stats in memory],
    }


if __name__ == "__main__":
    main()
