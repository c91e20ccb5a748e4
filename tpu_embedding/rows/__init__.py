"""Rows of tables and slot variables in memory: packed, gathered, added to, replaced.

This folder is private to the package.

* `packed_rows`: rows packed into lines of 128 lanes (`RowLayout`, `PackedRows`).
* `narrow_rows`: rows of fewer than 32 bits per element, in 32-bit words.
* `access`: reads, adds to, replaces and sets rows, by id or by block.
* `row_storage`: where the rows of a stack are stored.
* `file_rows`: rows as files hold them, on the host.
* `row_gradients`: the gradient of a table, as `lookup/` passes it to `update/`.
"""
