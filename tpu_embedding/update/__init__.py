"""Applies optimizer rules to table rows and slot variables, in place.

`drivers` picks the rows that a rule runs on, and `parts` runs the rule on them. `state`
knows what optimizer states hold. `totals` sums over tables whose rows arrive in parts.
"""
