"""Lays tables out on a mesh before the first step, in one frozen plan.

`make_plan.py` makes the plan, and `plan.py` defines it. Traced stages receive only
arrays and the plan, which is static. docs/concepts/stacking.md draws the layout.
"""
