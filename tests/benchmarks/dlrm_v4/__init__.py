"""Tests of `benchmarks/dlrm_v4`, whose modules are imported by their names there."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[3] / "benchmarks" / "dlrm_v4"
FULL, SMALL = str(FOLDER / "full.py"), str(FOLDER / "small.py")

sys.path.insert(0, str(FOLDER))
