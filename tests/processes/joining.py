"""The start of a process of a job, as all workers of these tests do it."""

import sys

import jax


def join_job():
    """Joins the job of the command line, and returns its file and other arguments."""
    coordinator, num_processes, process, num_devices, *arguments = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(num_processes), int(process))
    return arguments
