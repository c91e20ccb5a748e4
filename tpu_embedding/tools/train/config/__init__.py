"""Run configs: the value that a file in `configs/` defines, and its data section."""
