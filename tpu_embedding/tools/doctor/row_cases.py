"""The cases that the doctor runs on the devices, as one table.

A case fixes the rows, the optimizer, the form of the ids, and the *directions* that run
in kernels. XLA runs all other directions. So a wrong result of a case with one
direction blames the kernel of that direction for one kind of row, which is what one
verdict decides (`kernel_verdicts.py`). Further cases run a whole step with kernels
wherever the plan has them.
"""

import dataclasses
from typing import Final, Literal, get_args

from tpu_embedding.kernel_verdicts import Capability, Direction, capability_of
from tpu_embedding.plan.capacity import ExchangeKind
from tpu_embedding.tools.doctor.dense_reference import RULES, RuleName

IdForm = Literal["one id", "pooled", "weighted", "ragged"]
"""`"one id"`: each sample has one id. `"pooled"`: several. `"weighted"`: several, with
weights. `"ragged"`: any number, also none, with weights."""

Coverage = Literal["quick", "each once", "all"]
"""`"quick"`: one kind of row. `"each once"`: each direction, kind of row, rule, form of
ids and exchange is in one case at least. `"all"`: each direction is checked with each
kind of row."""

Scope = Literal["one kernel", "rows", "all kernels"]
"""The kernels that a failed case refuses: that of its direction, all kernels for its
rows, or all of them."""

DIMS: Final = (32, 64, 128, 16, 8, 512)
"""Each kind of row that kernels reach; 512 stands for all rows of several lines."""

_DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)
_QUICK_DIM: Final = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCase:
    """One program to run, and the rows and ids to run it on.

    Attributes:
      name: name of the case, unique within a run.
      dim: elements of a row.
      scope: the kernels that a failure refuses.
      directions: the directions that run in kernels; none of rows that only XLA
        reaches.
      rule: the optimizer; None: the program only looks up.
      ids: form of the ids.
      exchange: exchange of rows between all devices; None: one device runs the case.
      needs_rounds: True if the exchange has little room, so that further rounds must
        run.
      has_many_rows: True for a table with more rows than float32, or 16 bits, can tell
        apart.
    """

    name: str
    dim: int
    scope: Scope
    directions: tuple[Direction, ...] = _DIRECTIONS
    rule: RuleName | None = "adagrad"
    ids: IdForm = "pooled"
    exchange: ExchangeKind | None = None
    needs_rounds: bool = False
    has_many_rows: bool = False

    @property
    def has_weights(self) -> bool:
        """True if the ids of the case have weights."""
        return self.ids in _WITH_WEIGHTS

    @property
    def is_timed(self) -> bool:
        """True if the kernels are timed beside XLA."""
        return self.scope != "all kernels"

    @property
    def capability(self) -> Capability | None:
        """The capability of a case for one kernel; None for other cases."""
        if self.scope != "one kernel":
            return None
        rule = "elements" if self.rule is None else RULES[self.rule].kind
        return capability_of(self.directions[0], self.dim, rule)

    def may_refuse(self, capability: Capability) -> bool:
        """Returns True if a failure of the case refuses a kernel."""
        if self.scope == "rows":
            return self.dim == capability.dim
        return self.scope == "all kernels" or self.capability == capability


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of a case.

    Attributes:
      case: name of the case.
      problem: wrong result, error, hang or crash with kernels; None: there is none.
      xla_problem: the same with XLA alone.
      seconds_per_call: time of one call with kernels; None: not timed.
      xla_seconds_per_call: time of one call with XLA alone.
      speed_ratio: XLA's time over that with kernels.
    """

    case: str
    problem: str | None = None
    xla_problem: str | None = None
    seconds_per_call: float | None = None
    xla_seconds_per_call: float | None = None
    speed_ratio: float | None = None


def row_cases(coverage: Coverage, num_devices: int) -> list[RowCase]:
    """Returns the cases of a run, in their order.

    Args:
      coverage: the combinations to check.
      num_devices: devices of this process; with one, no rows are exchanged.
    """
    if coverage == "quick":
        return [*_direction_cases(_QUICK_DIM), _step(_QUICK_DIM)]
    cases = [*_FORMS, *_RULES, *_exchanges(num_devices), _MANY_ROWS]
    if coverage == "all":
        for dim in DIMS:
            cases += [*_direction_cases(dim), _step(dim)]
        return cases
    for place, dim in enumerate(DIMS):
        cases.append(_direction_cases(dim)[place])
    by_xla = [dataclasses.replace(_step(dim), directions=()) for dim in (1, 100)]
    return [*cases, _step(DIMS[0]), _step(DIMS[-1]), *by_xla]


def _direction_cases(dim: int) -> list[RowCase]:
    """Returns a case for each capability of rows; there are as many as `DIMS`."""
    return [
        _direction_case("read", dim),
        _direction_case("pool", dim, ids="pooled"),
        _direction_case("spread", dim, ids="pooled", rule="sgd"),
        _direction_case("update", dim, rule="adagrad"),
        _direction_case("update", dim, rule="rowwise_adagrad"),
        # Clippy takes a total over the table, so XLA runs it, and a kernel adds.
        _direction_case("write", dim, rule="clippy_adagrad"),
    ]


def _direction_case(
    direction: Direction,
    dim: int,
    *,
    rule: RuleName | None = None,
    ids: IdForm = "one id",
) -> RowCase:
    by = "" if rule is None else f" by {rule}"
    return RowCase(
        name=f"{direction}{by}, dim {dim}",
        dim=dim,
        scope="one kernel",
        directions=(direction,),
        rule=rule,
        ids=ids,
    )


def _step(dim: int) -> RowCase:
    return RowCase(name=f"step, dim {dim}", dim=dim, scope="rows")


def _exchanges(num_devices: int) -> list[RowCase]:
    """Returns the cases that exchange rows, and one whose ids take several rounds."""
    cases = []
    for dim in (32, 512):
        padded = RowCase(
            name=f"padded exchange, dim {dim}",
            dim=dim,
            scope="all kernels",
            exchange="padded",
        )
        name = f"further rounds, dim {dim}"
        cases.append(dataclasses.replace(padded, name=name, needs_rounds=True))
        if num_devices > 1:
            name = f"ragged exchange, dim {dim}"
            cases.append(padded)
            cases.append(dataclasses.replace(padded, name=name, exchange="ragged"))
    return cases


_RULES: Final = [
    _direction_case("update", _QUICK_DIM, rule="sgd"),
    _direction_case("update", _QUICK_DIM, rule="adam"),
]

_WITH_WEIGHTS: Final[tuple[IdForm, ...]] = ("weighted", "ragged")
_FORMS: Final = [
    RowCase(name=f"{ids} ids, dim {dim}", dim=dim, scope="rows", ids=ids)
    for ids in _WITH_WEIGHTS
    for dim in (32, 128)
]

# The narrowest rows: a table of this many takes 0.5 GB on a chip. sgd keeps no slots.
_MANY_ROWS: Final = RowCase(
    name="many rows, dim 8",
    dim=8,
    scope="all kernels",
    rule="sgd",
    has_many_rows=True,
)
