"""Rows of tables and slot variables in memory: packed, gathered, added to, updated."""
