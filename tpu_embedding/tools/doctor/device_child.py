"""The child process that asks JAX for its devices, and prints them as JSON.

A TPU belongs to one process at a time, and its start may hang. So the doctor's parent
process asks no device itself.
"""

import json
import sys
from typing import Any

import jax


def describe_devices() -> dict[str, Any]:
    """Returns the devices that JAX finds, as JSON values."""
    local = {device.id for device in jax.local_devices()}
    devices = [
        {
            "id": device.id,
            "kind": device.device_kind,
            "process": device.process_index,
            "memory": _memory(device) if device.id in local else None,
        }
        for device in jax.devices()
    ]
    return {"platform": jax.default_backend(), "devices": devices}


def _memory(device: jax.Device) -> dict[str, int] | None:
    stats: Any = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return {
        "bytes_limit": int(stats["bytes_limit"]),
        "bytes_in_use": int(stats.get("bytes_in_use", 0)),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(describe_devices()), flush=True)
    except RuntimeError as error:
        sys.exit(f"{type(error).__name__}: {str(error).splitlines()[0]}")
