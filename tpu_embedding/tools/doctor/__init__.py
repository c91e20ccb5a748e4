"""Checks a machine: versions, variables, devices, memory, and rows on the live chip.

* `examine`: runs all checks, and yields the findings of the report.
* `child`: the program that touches the devices, in a process with a time limit.
* `cases`: the train steps that `child` compares with NumPy.
"""
