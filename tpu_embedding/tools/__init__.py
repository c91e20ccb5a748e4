"""The command `tpu-embedding`: everything that a program needs and a library does not.

The library imports nothing from this package. Each folder can be read, replaced or
deleted on its own: `cli` has the commands, `train` the training loop, `data` the file
readers, and `compile_report` and `doctor` one command each.
"""
