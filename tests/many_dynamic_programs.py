"""Checks many random programs on dynamic tables; see `test_dynamic_programs`.

python -m tests.many_dynamic_programs --programs 300 --seed 1
"""

import argparse
import os


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax

    from tests.functional.test_dynamic_programs import LOGS_PER_LAYOUT, check_program

    failures = []
    for i in range(arguments.programs):
        seed = 1000 * arguments.seed * LOGS_PER_LAYOUT + i
        if i % LOGS_PER_LAYOUT == 0:
            jax.clear_caches()
        try:
            check_program(seed)
        except AssertionError as error:
            failures.append(seed)
            print(f"seed {seed}: {str(error)[:300]}", flush=True)
        if i % 10 == 9:
            print(f"{i + 1} programs, {len(failures)} failures", flush=True)
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
