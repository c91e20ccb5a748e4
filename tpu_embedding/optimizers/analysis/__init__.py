"""Reads off the trace of an optimizer rule how the rule may be applied to rows."""
