"""Optimizer rules, one algorithm or family per file. `te.optimizers` exports them.

A rule is an optax transformation on rows `[rows, dim]`. It never sees row ids, shards
or rounds. `update/parts.py` passes it either the rows that a step looked up, or blocks
of all rows. `adam` follows TensorFlow, `lazy_adam` follows optax, and `rowwise` follows
FBGEMM.
"""
