"""Leaves out the scripts that wrote the fixtures.

They need the libraries whose checkpoints they write.
"""

collect_ignore_glob = ["fixtures/make_*.py"]
