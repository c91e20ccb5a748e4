"""Checks a machine: versions, devices, ports, and the kernels on the live chip."""
