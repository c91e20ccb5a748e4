"""Applies optimizer rules to table rows and slot variables, in place.

`drivers` picks the rows that a rule runs on, and `parts` runs it there. `state` knows
what optimizer states hold, and `totals` sums over tables whose rows arrive in pieces.
"""
