"""Tunes the C library's allocator, which JAX uses for arrays on CPUs.

GNU's C library requests each large buffer from Linux, which clears every new page. A
step that allocates hundreds of megabytes spends more time on clearing than on rows.
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
"""Bytes requested from Linux at a time."""


def keep_freed_memory() -> bool:
    """Keeps freed memory in this process for the next step's buffers.

    This speeds up CPU steps that allocate buffers over 32 MB, most of all on two or
    more emulated devices. Call it before JAX starts its threads: before your first
    array, mesh or plan. Note that it affects all libraries in the process, and that the
    process's memory stays at its peak. The training command calls it on CPUs; the
    library itself never does.

    Returns:
      True if the C library accepted the settings. Only GNU's C library has them.

    Example:
      >>> isinstance(keep_freed_memory(), bool)
      True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _MAX_INT, _TOP_PAD: _PAD_BYTES}
    settings[_ARENA_MAX] = 1  # A per-thread arena is limited to 64 MB.
    return all(mallopt(name, value) == 1 for name, value in settings.items())
