"""The command `tpu-embedding`, and the tools that it runs.

The library imports nothing from here. `cli` has the commands, `train` has the training
loop, and `data` has the file readers. `compile_report` and `doctor` each serve one
command.
"""
