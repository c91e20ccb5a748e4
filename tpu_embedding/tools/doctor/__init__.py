"""Checks a machine, from environment variables to trained rows (docs/guides/doctor.md).

`examine` runs all checks. `child` is a separate process that uses the devices.
"""
