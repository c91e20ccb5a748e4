"""The arrays that a plan describes: created, read out by table name, replaced."""
