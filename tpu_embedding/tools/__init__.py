"""The command `tpu-embedding`: all that a program needs and a library does not.

The layer imports nothing of this package. Each folder may be read, replaced or deleted
alone: `cli` has the commands, `train` the training loop, `data` the readers of files,
`compile_report` and `doctor` a command each.
"""
