"""Writes files of verdicts, as `tpu-embedding doctor` stores them."""

import dataclasses
import json

from tpu_embedding.kernel_verdicts import Verdict, current_versions, verdict_file

DATE = "2026-01-31"


def verdict(direction, dim=8, rule="elements", **fields):
    """Returns a verdict that allows the kernel, unless fields say otherwise."""
    given = {"problem": None, "speed_ratio": 1.5, "date": DATE} | fields
    return Verdict(direction=direction, dim=dim, rule=rule, **given)


def record_of(device_kind, backend, *verdicts, **versions):
    """Returns the record of some verdicts, with other versions if they are given."""
    return {
        "device_kind": device_kind,
        "backend": backend,
        "versions": current_versions() | versions,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


def write_records(*records):
    """Writes the file of verdicts, and returns its path."""
    path = verdict_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"records": records}))
    return path
