"""Optimizers at work: rows of table and slot variables, updated in place."""
