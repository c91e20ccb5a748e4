"""Helpers of the tests of readers: labels of steps, and damaged files."""

import numpy as np


def samples_of_steps(data, num_steps):
    """Returns the labels of the first steps, which number the samples in tests."""
    return np.concatenate([data.train_batch(step).labels for step in range(num_steps)])


def cut(path, num_bytes):
    """Shortens a file, as a broken copy does."""
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip(path, place):
    """Flips the bits of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
