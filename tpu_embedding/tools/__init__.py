"""The command `tpu-embedding`: what a program needs and a library does not.

The library imports nothing from here. Each folder can be read, replaced or deleted
alone: `cli` has the commands, `train` the training loop, `data` the file readers, and
`compile_report` and `doctor` one command each.
"""
