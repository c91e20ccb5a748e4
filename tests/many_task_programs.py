"""Checks any number of random multi-task programs, outside pytest.

Programs come in sets, which are compiled once. Prints each failure, and goes on:

    python -m tests.many_task_programs --programs 500 --seed 1
"""

import argparse
import os
import time
import traceback

from tests import conftest  # before jax is imported: eight CPU devices
from tests.task_programs import draw_programs
from tests.test_task_programs import check_programs

PROGRAMS_PER_SET = 5


def main():
    """Checks programs, and reports the largest difference between their layouts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first set")
    arguments = parser.parse_args()
    failed, largest, start = [], 0.0, time.monotonic()
    for done in range(0, arguments.programs, PROGRAMS_PER_SET):
        number = arguments.first + done // PROGRAMS_PER_SET
        num_programs = min(PROGRAMS_PER_SET, arguments.programs - done)
        try:
            programs = draw_programs(arguments.seed, number, num_programs)
            largest = max(largest, check_programs(programs))
        except Exception:
            failed.append(number)
            traceback.print_exc()
        conftest.jax.clear_caches()  # of traces, which keep their plans
        print(
            f"{done + num_programs} programs in {time.monotonic() - start:.0f} s, last "
            f"set {number}, largest difference {largest:.1e}, sets with failures "
            f"{failed}",
            flush=True,
        )
    return os.EX_SOFTWARE if failed else os.EX_OK


if __name__ == "__main__":
    raise SystemExit(main())
