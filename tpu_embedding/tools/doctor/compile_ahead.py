"""Compiles the programs of many cases at once, before the first one runs.

A TPU's compiler takes seconds for a program, and the host of a TPU has many cores. The
programs go to JAX's cache on disk, from which the cases read them. The parent makes the
cache and sets the variables of JAX that name it.

A program may crash the compiler. So the compilation is a case of its own, and a child
that starts after a loss compiles each program when its case runs. Then the crash blames
the right one.
"""

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import jax

from tpu_embedding.tools.doctor.protocol import CaseEnded, CaseStarted
from tpu_embedding.tools.doctor.row_inputs import abstract_arguments
from tpu_embedding.tools.doctor.row_programs import RowProgram

COMPILATION: Final = "compilation"
"""Name of the case, and of its capability."""

_MAX_SECONDS: Final = 45.0
"""Time after which the cases start. Programs that are not compiled by then follow."""

_CORES_PER_PROGRAM: Final = 4
_MAX_PROGRAMS: Final = 32


def programs_at_once() -> int:
    """Returns the number of programs to compile at the same time on this host.

    It is 0 without a cache on disk, and where few cores would gain little.
    """
    if jax.config.jax_compilation_cache_dir is None:
        return 0
    count = (os.cpu_count() or 1) // _CORES_PER_PROGRAM
    return min(count, _MAX_PROGRAMS) if count > 1 else 0


def compile_ahead(
    programs: Sequence[Callable[[], RowProgram]], num_threads: int
) -> Iterator[CaseStarted | CaseEnded]:
    """Compiles programs, and yields the events of a case that does.

    An error of a program is left to its own case.

    Args:
      programs: each makes a program.
      num_threads: programs that are compiled at the same time.
    """
    yield CaseStarted(case=COMPILATION, capability=COMPILATION)
    start = time.perf_counter()
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    futures = [pool.submit(_compile, make_program) for make_program in programs]
    done, _ = concurrent.futures.wait(futures, timeout=_MAX_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    compiled = [future for future in done if future.exception() is None]
    yield CaseEnded(
        case=COMPILATION,
        capability=COMPILATION,
        ok=True,
        problem=None,
        seconds=time.perf_counter() - start,
        figures={"programs": len(futures), "compiled": len(compiled)},
    )


def _compile(make_program: Callable[[], RowProgram]) -> None:
    program = make_program()
    program.step.lower(*abstract_arguments(program)).compile()
