"""Parts for recommenders, built on the layer. The layer never imports them.

Users find the names in `te.metrics`, `te.nn`, `te.functional` and `te.inputs`.
"""
