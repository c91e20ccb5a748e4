"""The command `tpu-embedding`: what a program needs and a library does not.

The library imports nothing from here. `cli` has the commands, `train` the training
loop, and `data` the file readers; `compile_report` and `doctor` serve one command each.
"""
