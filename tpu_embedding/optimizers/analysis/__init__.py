"""Analyses of traced optimizer rules: how the layer may apply a rule to rows."""
