"""Rows of tables and slot variables in memory. Private to the package.

Start with `packed_rows` for how rows are packed into lines, then `access` for reads and
writes. `narrow_rows` has bfloat16 and int8 rows, and `file_rows` converts rows for
files. `row_gradients` is what `lookup/` passes to `update/`.
"""
