"""Run configs: the value that a file in `configs/` defines, and its data section.

`run_config` has the value. `config_files` finds and reads the file, and `overrides`
applies `--set`. `schedules` has learning rates. A data section is a source.
`data_source` has its interface; `file_sources`, `movielens_source`, `event_sources` and
`synthetic_sources` have those of the package.
"""
