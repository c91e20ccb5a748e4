"""A finding of the doctor: what it saw, if that is right, and the way out."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Status = Literal["ok", "warning", "failed", "unmeasured"]
"""`"warning"`: it may be intended. `"unmeasured"`: it could not be checked here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
      check: the thing that was checked, such as `"variable JAX_PLATFORMS"`.
      status: of the check.
      text: one or two sentences with the values found.
      way_out: the thing to do about it; None: nothing.
    """

    check: str
    status: Status
    text: str
    way_out: str | None = None


def has_failures(findings: Sequence[Finding]) -> bool:
    """Returns True if some check failed."""
    return any(finding.status == "failed" for finding in findings)
