"""Writes text in the format of Criteo's logs."""

import numpy as np


def criteo_lines(num_lines, seed=0):
    """Returns lines of 40 fields, some of them empty."""
    generator = np.random.default_rng(seed)
    lines = []
    for _ in range(num_lines):
        integers = generator.integers(-3, 1000, 13).astype(str)
        categories = [f"{n:08x}" for n in generator.integers(0, 2**32, 26)]
        fields = np.array([str(generator.integers(2)), *integers, *categories])
        fields[1:][generator.random(39) < 0.2] = ""
        lines.append("\t".join(fields) + "\n")
    return lines


def write_criteo_text(path, num_lines=100):
    """Writes lines to a file, and returns its path."""
    path.write_text("".join(criteo_lines(num_lines)))
    return path
