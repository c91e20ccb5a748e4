"""Checks a machine: versions, variables, devices, memory, and rows on the live chip.

* `examine`: runs all checks, and prints the report.
* `environment`: versions, and variables that change what JAX sees of a TPU.
* `devices`: the devices that JAX finds, their memory, and processes that hold them.
* `child`: the program that touches the devices, in a process with a time limit.
"""
