"""Forms in which users hold ids on the host, and ids made from strings."""
