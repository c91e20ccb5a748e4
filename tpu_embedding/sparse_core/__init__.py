"""XLA's own SparseCore operations, driven from raw ids inside `jit`.

`partition_ids` sorts the ids of a device into the buffers that the operations read.
`lookup` and `update` are the operations, `row_rule` lowers an optimizer to their
arithmetic on rows, and `limits` says how many ids they take.
"""
