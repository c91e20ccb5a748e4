"""Applies optimizer rules to rows of tables and slot variables, in place.

All of it is private but `lift_to_rows`, which is in `te.functional`.

* `apply`: applies the gradient of a step by the driver of the rule: on touched rows, or
  once per occurrence of an id.
* `every_row`: drivers that run a rule on every row, block by block.
* `lazy_update`: one step of a rule, on touched rows.
* `table_writer`: writes new rows in the table's type, rounded where it is narrow.
* `totals`: totals over the rows of each table, which arrive in rounds or blocks.
"""
