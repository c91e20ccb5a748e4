"""The processes of a run: a parent that restarts them, signals, locks, slow steps.

`tpu-embedding train` replaces itself by a parent process, which starts the training as
a worker. The JAX runtime aborts the survivors of a process that dies, without a Python
exception. So the parent imports nothing but the standard library, neither jax nor the
rest of this package.

The parent:

* `parent_command`: puts a command under the parent.
* `__main__`: the file that Python runs as the parent.
* `parent`: starts the worker, watches it, restarts it.
* `workers`: the worker as the parent sees it: its process, output and pulses.
* `failures`: says why a worker ended, and if a restart may help.

The worker:

* `pulses`: tells the parent that the worker is alive, and how far it is.
* `early_signals`: ends the command by its own status at a signal before the run.
* `stop_signals`: lets all processes save the same step and stop at a signal.
* `slow_steps`: prints the stacks of all threads during a step that takes too long.
* `run_lock`: keeps a second run out of the directory of a run.

Both: `exit_status` has the exit statuses and the signals that stop a run.
"""
