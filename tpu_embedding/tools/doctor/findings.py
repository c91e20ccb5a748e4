"""A finding of the doctor: the thing it saw, if that is right, and the way out."""

import dataclasses
from typing import Final, Literal

Status = Literal["ok", "warning", "failed", "unmeasured"]
"""`"warning"`: it may be intended. `"unmeasured"`: it could not be checked here."""

_MARKS: Final = {"warning": "WARNING", "failed": "FAILED"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
      check: the thing that was checked, such as `"variable JAX_PLATFORMS"`.
      status: result of the check.
      text: one or two sentences with the values found.
      way_out: the thing to do about it; None: nothing.
    """

    check: str
    status: Status
    text: str
    way_out: str | None = None

    def __str__(self) -> str:
        line = f"{_MARKS.get(self.status, self.status):10}  {self.check}: {self.text}"
        if self.way_out is not None:
            line += f"\n{'':10}  -> {self.way_out}"
        return line
