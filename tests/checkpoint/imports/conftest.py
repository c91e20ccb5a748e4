"""Leaves out the scripts that wrote the fixtures: they need other libraries."""

collect_ignore_glob = ["fixtures/make_*.py"]
