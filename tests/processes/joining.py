"""The start of a process of a job, as all workers of these tests do it."""

import jax


def start_devices(coordinator, num_processes, process, num_devices):
    """Emulates CPU devices, and joins the job if it has several processes.

    Takes the worker's arguments as the command line has them, as strings.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(num_devices))
    if int(num_processes) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, int(num_processes), int(process))
