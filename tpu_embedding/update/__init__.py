"""Applies optimizer rules to tables' rows and slot variables, in place.

Everything is private except `lift_to_rows`, which is in `te.functional`.

* `drivers`: applies a step's gradient, and chooses the parts that the rule runs on.
* `parts`: runs a rule on one part of a table.
* `state`: the optimizer state of a stacked table.
* `totals`: totals over each table's rows, which arrive in rounds or blocks.
"""
