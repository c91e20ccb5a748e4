"""The processor that figures were measured on: its model and its vector instructions.

Libraries choose their code by these. A ratio of two libraries holds for one processor.
"""

import os
import pathlib
import platform
from typing import Any, Final

CPU_FILE: Final = pathlib.Path("/proc/cpuinfo")

_VECTORS: Final = ("avx", "amx", "sve", "neon", "asimd", "fma", "f16c")
"""First letters of the flags that name vector instructions, on x86 and on Arm."""


def describe_machine() -> dict[str, Any]:
    """Returns the fields of a document of figures that describe this machine.

    The model is empty where the system does not tell it.
    """
    text = CPU_FILE.read_text() if CPU_FILE.exists() else ""
    return {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "cpu": {
            "model": _field(text, "model name"),
            "instruction_sets": [
                flag
                for flag in (_field(text, "flags") or _field(text, "Features")).split()
                if flag.startswith(_VECTORS)
            ],
        },
    }


def _field(text: str, name: str) -> str:
    """Returns a field of the first processor in `/proc/cpuinfo`, or nothing."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
