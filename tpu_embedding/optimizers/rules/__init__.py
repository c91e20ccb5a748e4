"""Optimizer rules, one algorithm per file."""
