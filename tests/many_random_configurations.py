"""Checks any number of random configurations, outside pytest.

Prints each failure in its smallest form, and goes on:

    python -m tests.many_random_configurations --examples 2000 --seed 1
"""

import argparse
import os
import traceback

from tests import conftest  # before jax is imported: eight CPU devices
from tests.test_random_configurations import random_examples

EXAMPLES_PER_SEED = 20


def main():
    """Checks examples in groups, each with a seed of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first group")
    arguments = parser.parse_args()
    failed, num_groups = [], -(-arguments.examples // EXAMPLES_PER_SEED)
    for seed in range(arguments.seed, arguments.seed + num_groups):
        try:
            random_examples(EXAMPLES_PER_SEED, seed)()
        except Exception:
            failed.append(seed)
            traceback.print_exc()
        conftest.jax.clear_caches()  # of traces, which keep their plans
        print(f"last seed {seed}, seeds with failures {failed}", flush=True)
    return os.EX_SOFTWARE if failed else os.EX_OK


if __name__ == "__main__":
    raise SystemExit(main())
