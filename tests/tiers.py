"""The tiers of tests, and which cases of a test run in which.

`scripts/test.sh` runs the quick tier, `--all` the full tier, `--exhaustive` the
exhaustive one. Plain `pytest` runs every test, `pytest -m "not full"` the quick tier,
and `pytest -m "not exhaustive"` the full one. A test or a case that is marked `full` or
`exhaustive` runs from that tier on.

The full tier adds no case to a test of the quick tier, and runs the middle one of a
test whose cases are all marked `full`; the exhaustive tier runs all.
`full(every_case=True)` keeps all in the full tier.

The functions return cases for `pytest.mark.parametrize`, most of them with such marks.
A case is what that takes: a value, a tuple with a value for each name, or a
`pytest.param`. Cases are named by the ids that pytest shows.
"""

import collections
import enum
import itertools
from collections.abc import Iterable, Mapping

import pytest

Case = type(pytest.param())


def quick_cases(cases: Iterable, *ids: str, every_case: bool = False) -> list[Case]:
    """Leaves the cases of these ids in the quick tier, and moves all others.

    Args:
        cases: Values, tuples of values, or `pytest.param`.
        *ids: Ids of cases that run in the quick tier.
        every_case: Whether the full tier runs the others, and not only the exhaustive.
    """
    cases = [_as_case(case) for case in cases]
    others = {_id_of(case) for case in cases} - _known(ids, cases)
    return [_in_full_tier(case, others, every_case) for case in cases]


def full_cases(cases: Iterable, *ids: str) -> list[Case]:
    """Moves the cases of these ids to the full tier."""
    cases = [_as_case(case) for case in cases]
    moved = _known(ids, cases)
    return [_in_full_tier(case, moved) for case in cases]


def matrix(*parameters: Iterable) -> list[Case]:
    """Returns all combinations of the parameters' cases; the last changes fastest."""
    combinations = itertools.product(*([_as_case(c) for c in p] for p in parameters))
    return [_joined(cases) for cases in combinations]


def each_once(*parameters: Iterable) -> list[Case]:
    """Returns the matrix of the parameters; the quick tier runs its diagonal.

    That is step k of all parameters at once, for each k: each value at least once. A
    parameter with fewer values than the longest starts over.
    """
    parameters = [[_as_case(case) for case in cases] for cases in parameters]
    longest = max(len(cases) for cases in parameters)
    diagonal = {
        _id_of(_joined([cases[step % len(cases)] for cases in parameters]))
        for step in range(longest)
    }
    return quick_cases(matrix(*parameters), *diagonal)


def with_ids(cases: Mapping[str, object]) -> list[Case]:
    """Returns the cases of a dict, with its keys for ids."""
    named = zip(cases, map(_as_case, cases.values()), strict=True)
    return [pytest.param(*case.values, marks=case.marks, id=i) for i, case in named]


def _as_case(case: object) -> Case:
    if isinstance(case, Case):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)


def _joined(cases: Iterable[Case]) -> Case:
    cases = list(cases)
    return pytest.param(
        *(value for case in cases for value in case.values),
        marks=[mark for case in cases for mark in case.marks],
        id="-".join(_id_of(case) for case in cases),
    )


def _id_of(case: Case) -> str:
    """Returns the id that pytest makes of the values."""
    if case.id is not None:
        return case.id
    return "-".join(_name_of(value) for value in case.values)


def _name_of(value: object) -> str:
    if value is None or isinstance(value, str | int | float | enum.Enum):
        return str(value)
    if not isinstance(getattr(value, "__name__", None), str):
        raise ValueError(f"give the case of {value!r} an id: pytest.param(..., id=...)")
    return value.__name__


def _known(ids: Iterable[str], cases: list[Case]) -> set[str]:
    """Returns the ids, once it is sure that each is that of a case."""
    unknown = set(ids) - {_id_of(case) for case in cases}
    if unknown:
        raise ValueError(f"no case has one of these ids: {sorted(unknown)}")
    return set(ids)


def _in_full_tier(case: Case, ids: set[str], every_case: bool = False) -> Case:
    """Marks the case `full` if its id is among the ids."""
    if _id_of(case) not in ids:
        return case
    full = pytest.mark.full(every_case=every_case)
    return pytest.param(*case.values, marks=[*case.marks, full], id=case.id)


def mark_exhaustive_cases(items: list[pytest.Item]) -> None:
    """Moves cases of the full tier, but for one of a test that has no quick case."""
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("full")
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        full = [case for case in cases if _may_move(case)]
        if len(full) == len(cases):
            del full[len(full) // 2]
        for case in full:
            case.add_marker("exhaustive")


def _may_move(case: pytest.Item) -> bool:
    marks = list(case.iter_markers("full"))
    return bool(marks) and not any(mark.kwargs.get("every_case") for mark in marks)
