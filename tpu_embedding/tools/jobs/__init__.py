"""A parent process that watches over the workers of a run, and restarts them.

`tpu-embedding train` replaces itself by `parent.py`, which starts the workers. A worker
tells its parent that it is alive by `pulses.py`. The JAX runtime aborts the survivors
of a process that dies, without a Python exception. So the parent imports nothing but
the standard library, neither jax nor the rest of this package.
"""
