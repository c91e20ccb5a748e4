"""Applies optimizer rules to rows of tables and slot variables, in place."""
