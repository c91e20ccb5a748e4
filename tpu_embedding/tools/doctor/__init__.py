"""Checks a machine: versions, variables, devices, memory, and rows on the live chip.

* `examine`: runs all checks, in the order of a report.
* `findings`: the result of one check, with the way out.
* `environment`: versions, and variables that change what JAX sees of a TPU.
* `devices`: the devices that JAX finds, their memory, and processes that hold them.

All work on the devices happens in a child process:

* `child_process`: the child as its parent sees it, with a time limit per question.
* `child`: the program of the child.
* `kernel_checks`: asks the child for all cases, and turns results into verdicts.
* `verdict_store`: writes the file of verdicts.

The cases:

* `row_cases`: the table of cases.
* `row_programs`: the plan and the jitted step of a case, by the functional core.
* `row_inputs`: the random rows, ids and cotangents of a case.
* `dense_reference`: the same step in NumPy.
* `row_checks`: compares the results of the two.
* `row_speed`: times kernels beside XLA.
"""
