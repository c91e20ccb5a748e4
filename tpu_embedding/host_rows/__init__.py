"""Rows of tables in host memory, with a cache of some on the devices."""
