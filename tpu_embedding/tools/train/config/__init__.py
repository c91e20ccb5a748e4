"""Run configs: the value that a file in `configs/` defines.

`run_config` has the value. `config_files` finds and reads the file, and `overrides`
applies `--set`. `schedules` has learning rates. The sources of the data section
are in `tools/data/`.
"""
