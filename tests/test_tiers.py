import pytest

from tests.tiers import each_once, full_cases, matrix, quick_cases, with_ids


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
