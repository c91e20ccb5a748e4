"""Optimizer rules, one algorithm or family per file. `te.optimizers` exports them.

A rule is an optax transformation on rows `[rows, dim]`. It never sees row ids, shards
or rounds: `update/parts.py` passes it only the rows that a step looked up, or all rows
in blocks. `adam` follows TensorFlow, `lazy_adam` follows optax, and `rowwise` follows
FBGEMM.
"""
