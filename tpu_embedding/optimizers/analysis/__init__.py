"""Analyses of traced optimizer rules: how the layer may apply a rule to rows.

A rule is traced once, and its program is read:

* `trace`: traces a rule, and keeps its programs for all analyses below.
* `rule_program`: such a program, in which the number of rows is a symbol.
* `operations`: the table of JAX primitives: what each does with rows.
* `walker`: goes through a program, operation by operation.

The answers:

* `row_local`: is each row treated separately? Other rules are refused.
* `slots`: which parts of the state are slot variables, and of which shapes? Does a rule
  set rows without reading them?
* `initial_slots`: which slot variables start with one number everywhere?
* `row_totals`: turns norms and other reductions over rows into totals over the table.
* `finite_rates`: does the next step multiply rows by NaN or infinity?
* `coupling`: does a dense optimizer update one array by the gradient of another?
"""
