"""Creates the stacked tables of a plan, and reads or replaces them by table name."""
