"""Applies optimizer rules to tables' rows and slot variables, in place.

Everything is private except `lift_to_rows`, which is in `te.functional`.

* `apply`: applies a step's gradient with the rule's driver.
* `every_row`: drivers that run a rule on every row, block by block.
* `lazy_update`: one step of a rule on touched rows.
* `table_writer`: writes rows in the table's dtype, with rounding if it is narrow.
* `totals`: totals over each table's rows, which arrive in rounds or blocks.
"""
