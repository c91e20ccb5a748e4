"""XLA's SparseCore operations, called with raw ids inside `jit`.

`partition_ids` sorts a device's ids into the buffers that the operations read. `lookup`
and `update` run the operations, `row_rule` lowers an optimizer to arithmetic on rows,
and `limits` chooses how many ids an operation accepts.
"""
