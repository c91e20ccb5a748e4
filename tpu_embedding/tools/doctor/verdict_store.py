"""Writes the file of verdicts that `kernel_verdicts.py` reads."""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Sequence

from tpu_embedding.kernel_verdicts import (
    KernelName,
    Verdict,
    current_versions,
    load_verdicts,
    read_records,
    verdict_file,
)


def store_verdicts(
    device_kind: str,
    backend: KernelName,
    verdicts: Sequence[Verdict],
    *,
    is_complete: bool = True,
) -> pathlib.Path:
    """Stores the verdicts on a device kind for this machine's versions.

    Verdicts on other device kinds stay. The file is replaced atomically.

    Args:
      device_kind: JAX's name of the device.
      backend: the backend that ran the kernels.
      verdicts: the verdicts of one check.
      is_complete: True: they replace all earlier ones on the device kind. False: the
        check left cases out, so it can refuse kernels but allow none. Only its problems
        are stored, and earlier verdicts on other capabilities stay.

    Returns:
      The path of the file.

    Raises:
      OSError: if the directory cannot be written.
    """
    if not is_complete:
        earlier = load_verdicts(device_kind, backend).verdicts
        refused = [verdict for verdict in verdicts if verdict.problem is not None]
        verdicts = list({v.capability: v for v in (*earlier, *refused)}.values())
    path = verdict_file()
    records = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        records = read_records(path)
    records[device_kind, backend] = {
        "device_kind": device_kind,
        "backend": backend,
        "versions": current_versions(),
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }
    document = {"records": list(records.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".verdicts-", delete=False, encoding="utf-8"
    ) as file:
        temporary = pathlib.Path(file.name)
        try:
            file.write(json.dumps(document, indent=1) + "\n")
            file.close()
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path
