import pytest

from tests.tiers import (
    each_once,
    full_cases,
    mark_exhaustive_cases,
    matrix,
    quick_cases,
    with_ids,
)


def full(cases):
    """Returns the ids of the cases in the full tier."""
    return {case.id for case in cases if any(m.name == "full" for m in case.marks)}


LETTERS = with_ids({"a": 1, "b": 2, "c": 3})


def test_cases_are_named_by_their_ids():
    assert full(quick_cases(LETTERS, "b")) == {"a", "c"}
    assert full(full_cases(LETTERS, "b")) == {"b"}
    pairs = matrix(LETTERS, [None, int])
    assert [case.id for case in pairs][:3] == ["a-None", "a-int", "b-None"]
    assert pairs[1].values == (1, int)


def test_the_diagonal_has_each_value_once():
    assert full(each_once(LETTERS, [8, 16])) == {"a-16", "b-8", "c-16"}


def test_a_name_without_a_case_is_refused():
    with pytest.raises(ValueError, match=r"no case has one of these ids: \['d'\]"):
        quick_cases(LETTERS, "a", "d")


class Item:
    """A case as pytest collects it."""

    def __init__(self, case):
        self.nodeid, self.marks = f"test[{case.id}]", [x.mark for x in case.marks]

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)


@pytest.mark.parametrize(("every_case", "expected"), [(False, "c"), (True, "bcd")])
def test_the_full_tier_runs_the_middle_case_or_all(every_case, expected):
    cases = with_ids(dict.fromkeys("abcd"))
    items = [Item(case) for case in quick_cases(cases, "a", every_case=every_case)]
    mark_exhaustive_cases(items)
    added = [x for x in items if x.get_closest_marker("full")]
    kept = [x.nodeid[5] for x in added if not x.get_closest_marker("exhaustive")]
    assert "".join(kept) == expected
