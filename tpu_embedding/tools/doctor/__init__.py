"""Checks a machine, from its variables to the trained rows (docs/guides/doctor.md).

`examine` runs all checks. `child` touches the devices, in a process of its own.
"""
