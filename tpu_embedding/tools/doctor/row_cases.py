"""The cases that the doctor's child runs on the devices, as one table.

A case fixes the rows, the optimizer, the form of the ids, and the *directions* that run
in kernels. All other directions run in XLA. So a wrong result blames one direction for
one kind of row, which is what one verdict decides (`kernel_verdicts.py`). Further cases
run a whole step with kernels wherever the plan has them.
"""

import dataclasses
from typing import Final, Literal, get_args

from tpu_embedding.kernel_verdicts import Direction, RuleKind, capability_name
from tpu_embedding.plan.capacity import ExchangeKind
from tpu_embedding.rows.kernels.kernel_access import Backend
from tpu_embedding.tools.doctor.dense_reference import RuleName
from tpu_embedding.tools.doctor.protocol import Tier

IdForm = Literal["one id", "pooled", "weighted", "ragged"]
"""`"one id"`: each sample has one id. `"pooled"`: several. `"weighted"`: several, with
weights. `"ragged"`: any number, also none, with weights."""

Owner = Literal["any", "one"]
"""`"one"`: one device owns all rows that the ids name, and the exchange has little
room, so that further rounds must run."""

Rows = Literal["some", "many"]
"""`"many"`: rows beyond those whose numbers float32, or 16 bits, can count."""

Coverage = Literal["all", "each once"]
"""`"each once"`: each direction, kind of row, rule, form of ids and exchange is in one
case at least. `"all"`: each direction is checked with each kind of row."""

DIMS: Final = (32, 64, 128, 16, 8, 512)
"""Each kind of row that kernels reach; 512 stands for all rows of several lines."""

_OTHER_DIMS: Final = (1, 100)
"""Rows that only XLA reaches."""

_FORMS: Final[tuple[tuple[IdForm, int], ...]] = (
    ("weighted", 32),
    ("weighted", 128),
    ("ragged", 128),
    ("ragged", 32),
)
_MANY_ROWS: Final = "many rows"
_ROUNDS: Final = "further rounds"
_EXCHANGES: Final = (
    ("padded exchange", 32),
    ("padded exchange", 512),
    ("ragged exchange", 512),
    ("ragged exchange", 32),
    (_ROUNDS, 32),
    (_ROUNDS, 512),
)
_QUICK_DIM: Final = 32
_DIRECTIONS: Final[tuple[Direction, ...]] = get_args(Direction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCase:
    """One program to run, and the rows and ids to run it on.

    Attributes:
      name: unique among the cases of a run.
      capability: that the case belongs to.
      directions: those that run in kernels, unless the backend is XLA.
      dim: elements of a row.
      rule: the optimizer; None: the program only looks up.
      ids: form of the ids.
      exchange: of rows between all devices; None: the program runs on one device.
      owner: of the rows that the ids name.
      rows: of the larger table.
    """

    name: str
    capability: str
    dim: int
    directions: tuple[Direction, ...] = _DIRECTIONS
    rule: RuleName | None = "adagrad"
    ids: IdForm = "pooled"
    exchange: ExchangeKind | None = None
    owner: Owner = "any"
    rows: Rows = "some"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DirectionCase:
    """A direction to check with each kind of row."""

    direction: Direction
    rule: RuleName | None = None
    ids: IdForm = "one id"
    rule_kind: RuleKind = "elements"

    def of_rows(self, dim: int) -> RowCase:
        """Returns the case for rows of `dim`."""
        capability = capability_name(self.direction, dim, self.rule_kind)
        return RowCase(
            name=capability,
            capability=capability,
            dim=dim,
            directions=(self.direction,),
            rule=self.rule,
            ids=self.ids,
        )


_DIRECTION_CASES: Final = (
    _DirectionCase(direction="read"),
    _DirectionCase(direction="pool", ids="pooled"),
    _DirectionCase(direction="spread", ids="pooled", rule="sgd"),
    _DirectionCase(direction="update", rule="adagrad"),
    _DirectionCase(
        direction="update", rule="partial_rowwise_lamb", rule_kind="row sums"
    ),
    # Clippy takes a total over the table, so XLA runs it, and its result is added.
    _DirectionCase(direction="write", rule="clippy_adagrad"),
)

_RULES: Final[dict[RuleName, RuleKind]] = {
    "sgd": "elements",
    "adam": "elements",
    "rowwise_adagrad": "row sums",
}
"""The rules that the cases of directions and steps leave out."""

_RULES_BY_XLA: Final[dict[RuleName, RuleKind]] = {
    **_RULES,
    "partial_rowwise_lamb": "row sums",
    "clippy_adagrad": "row sums",
}


# The narrowest rows: a table of this many takes 0.5 GB on a chip. sgd keeps no slots.
_MANY_CASE: Final = RowCase(
    name=f"{_MANY_ROWS}, dim {min(DIMS)}",
    capability=_MANY_ROWS,
    dim=min(DIMS),
    rule="sgd",
    rows="many",
)


def row_cases(
    backend: Backend, tier: Tier, coverage: Coverage, num_devices: int
) -> list[RowCase]:
    """Returns the cases whose results are compared with the dense reference.

    Cases that decide on all kinds of row come first, then those of one kind together,
    the most usual rows first. So a run that is cut short has checked some kinds of row
    completely.

    Args:
      backend: of the kernels, or XLA.
      tier: the quick tier has one kind of row.
      coverage: of the full tier. XLA needs no verdicts, so it runs each case once.
      num_devices: exchanges need several.
    """
    if tier == "quick":
        return _cases_of_rows(backend, _QUICK_DIM)
    exchanges = [
        RowCase(
            name=f"{kind}, dim {dim}",
            capability=kind,
            dim=dim,
            exchange="ragged" if kind == "ragged exchange" else "padded",
            owner="one" if kind == _ROUNDS else "any",
        )
        for kind, dim in _EXCHANGES
        if num_devices > 1 or kind == _ROUNDS
    ]
    forms = [
        RowCase(name=f"{ids} ids, dim {dim}", capability=_step(dim), dim=dim, ids=ids)
        for ids, dim in _FORMS
    ]
    if backend != "xla" and coverage == "all":
        of_rows = [case for dim in DIMS for case in _cases_of_rows(backend, dim)]
        return [_MANY_CASE, *exchanges, *_cases_of_rules(backend), *forms, *of_rows]
    further = [*exchanges[::2], *_cases_of_rules(backend), *forms[::2]]
    if backend == "xla":
        return [*further, *map(_whole_step, (*DIMS, *_OTHER_DIMS))]
    diagonal = zip(_DIRECTION_CASES, DIMS, strict=True)
    of_directions = [case.of_rows(dim) for case, dim in diagonal]
    steps = [_whole_step(DIMS[0]), _whole_step(DIMS[-1])]
    return [_MANY_CASE, *further, *of_directions, *steps]


def timed_cases(backend: Backend, tier: Tier, coverage: Coverage) -> list[RowCase]:
    """Returns the cases whose time is measured: those of single directions, and steps.

    Args:
      backend: of the kernels, or XLA.
      tier: the quick tier has one kind of row.
      coverage: of the full tier; one kind of row is each direction once.
    """
    dims = DIMS if tier == "full" and coverage == "all" else (_QUICK_DIM,)
    return [case for dim in dims for case in _cases_of_rows(backend, dim)]


def _cases_of_rows(backend: Backend, dim: int) -> list[RowCase]:
    """Returns a case for each direction, and the whole step; XLA has no directions."""
    of_directions = [case.of_rows(dim) for case in _DIRECTION_CASES]
    return [*(of_directions if backend != "xla" else ()), _whole_step(dim)]


def _whole_step(dim: int) -> RowCase:
    return RowCase(name=_step(dim), capability=_step(dim), dim=dim)


def _cases_of_rules(backend: Backend) -> list[RowCase]:
    """Returns a case for each rule that the other cases leave out."""
    rules = _RULES_BY_XLA if backend == "xla" else _RULES
    return [
        RowCase(
            name=f"rule {rule}, dim {_QUICK_DIM}",
            capability=capability_name("update", _QUICK_DIM, kind),
            dim=_QUICK_DIM,
            directions=("update",),
            rule=rule,
            ids="one id",
        )
        for rule, kind in rules.items()
    ]


def _step(dim: int) -> str:
    return f"step, dim {dim}"
