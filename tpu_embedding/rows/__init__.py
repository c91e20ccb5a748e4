"""Rows of tables and slot variables in memory: packed, gathered, added to, replaced.

All of it is private to the package.

* `packed_rows`: how rows lie in lines of 128 lanes (`RowLayout`, `PackedRows`).
* `narrow_rows`: rows of fewer than 32 bits per element, in 32-bit words.
* `access`: reads, adds to, replaces and sets rows.
* `lane_groups`: the lanes of a row within its line, for `access`.
* `consecutive_rows`: reads and writes blocks of rows, for passes over a table.
* `file_rows`: rows as files hold them, on the host.
* `row_gradients`: the gradient of a table, as `lookup/` hands it to `update/`.
* `opaque_row_ids`: hides row ids in a gradient, so that arithmetic on them is refused.
"""
