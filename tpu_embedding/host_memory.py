"""Memory of the C library, from which JAX takes its arrays on CPUs.

GNU's C library asks Linux for each large buffer, and gives it back when it is freed.
Linux clears every page of a new buffer when it is first written. A step that allocates
hundreds of megabytes spends more time on pages than on rows.
"""

import ctypes
from typing import Final

__all__ = ["keep_freed_memory"]

# Parameters of `mallopt`, from glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8

_MAX_INT: Final = 2**31 - 1
_PAD_BYTES: Final = 64 * 2**20
"""Memory that is asked for at a time."""


def keep_freed_memory() -> bool:
    """Keeps freed memory in this process, for the buffers of the next step.

    Steps on CPUs get faster where they allocate buffers of more than 32 MB, most of all
    on two or more emulated devices. Call it before JAX starts its threads: before the
    first array, mesh or plan. The setting holds for all libraries of the process,
    and the memory of the process stays at its peak. The training command calls this
    function on CPUs; the library never does by itself.

    Returns:
      True if the C library took the settings. Only GNU's has them: elsewhere nothing
      changes.

    Example:
      >>> isinstance(keep_freed_memory(), bool)
      True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _MAX_INT, _TOP_PAD: _PAD_BYTES}
    settings[_ARENA_MAX] = 1  # An arena of a thread of its own is limited to 64 MB.
    return all(mallopt(name, value) == 1 for name, value in settings.items())
