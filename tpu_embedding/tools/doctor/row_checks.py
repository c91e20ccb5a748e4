"""Compares the results of a case on the devices with the dense reference."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.tables.slot_values import slot_values
from tpu_embedding.tables.table_values import unstack_tables
from tpu_embedding.tools.doctor.dense_reference import (
    RULES,
    gradient_by_row,
    pooled_rows,
)
from tpu_embedding.tools.doctor.row_cases import RowCase
from tpu_embedding.tools.doctor.row_inputs import CaseInputs, make_inputs
from tpu_embedding.tools.doctor.row_programs import RowProgram

_STEP_TOLERANCE: Final = 2.0**-13
"""Error of a new value, as a share of its change. Roots, quotients and powers of a TPU
are some units of float32 wrong, 2**-23 each; bfloat16 is wrong by 2**-9."""

_VALUE_TOLERANCE: Final = 2.0**-22
"""Error of a new value, as a share of the old and the new value, which are rounded."""

_QUOTIENT_TOLERANCE: Final = 2.0**-20
"""Error of a weighted mean of numbers below 1, whose divisor float32 rounds."""

_SAME_BITS: Final = None
"""In place of a tolerance: all bits must agree, those of 0.0 and -0.0 too."""

_SEEDS: Final = (0, 1)

_NUM_SHOWN: Final = 4
"""Elements of a row that a problem shows."""


def find_problem(program: RowProgram) -> str | None:
    """Runs the program of a case on random inputs, and compares its results.

    Returns:
      The first problem; None if all results agree with the dense reference.
    """
    for seed in _SEEDS:
        inputs = make_inputs(program, seed)
        results = program.step(*inputs.arguments)
        problem = next(_problems(program, inputs, *results), None)
        if problem is not None:
            return f"seed {seed}: {problem}"
    return None


def _problems(
    program: RowProgram,
    inputs: CaseInputs,
    activations: Any,
    rounds: Any,
    tables: Any,
    slots: Any,
) -> Iterator[str]:
    """Yields the differences between the results and the reference."""
    case, plan = program.case, program.plan
    for name, old in inputs.old.items():
        is_exact = name == "sum" or not case.has_weights
        yield from _differences(
            f"activations of table {name!r}, sample",
            np.asarray(activations[name]),
            pooled_rows(old["values"], inputs.weighted[name]),
            np.float64(0 if is_exact else _QUOTIENT_TOLERANCE),
        )
    if case.needs_rounds and min(map(int, rounds.values())) < 2:
        yield "all ids fitted in one round, so no further round was checked"
    if case.rule is not None:
        new_tables = unstack_tables(tables, plan)
        new_slots = slot_values(slots, plan, parts="all")
        for name in inputs.old:
            new = {"values": new_tables[name], **new_slots[name]}
            yield from _problems_of_update(case, inputs, name, new)


def _problems_of_update(
    case: RowCase, inputs: CaseInputs, name: str, new: dict[str, np.ndarray]
) -> Iterator[str]:
    """Yields the differences of a table and its slot variables after the update.

    Args:
      case: the case.
      inputs: inputs of the program.
      name: name of the table.
      new: the values of `inputs.old[name]` after the update.
    """
    assert case.rule is not None
    rule, old = RULES[case.rule], inputs.old[name]
    row_ids, gradient = gradient_by_row(inputs.cotangents[name], inputs.weighted[name])
    all_ids = np.arange(len(old["values"]))
    others = np.setdiff1d(all_ids, row_ids, assume_unique=True)
    old_rows = {k: v[row_ids].astype(np.float64) for k, v in old.items() if v.ndim}
    expected = rule.step(old_rows, gradient)
    for key, found in new.items():
        place = f"table {name!r}, {key}"
        if not found.ndim:
            if found != old[key] + 1:
                yield f"{place}: expected {old[key] + 1} steps, got {found}"
            continue
        yield from _differences(
            f"{place}: no id names row",
            found[others],
            old[key][others],
            _SAME_BITS,
            others,
        )
        tolerance = np.float64(0)
        if not rule.is_exact or case.has_weights:
            before, after = old_rows[key], expected[key]
            tolerance = _STEP_TOLERANCE * np.abs(after - before)
            tolerance += _VALUE_TOLERANCE * (np.abs(after) + np.abs(before))
        yield from _differences(
            f"{place}: updated row", found[row_ids], expected[key], tolerance, row_ids
        )


def _differences(
    place: str,
    found: np.ndarray,
    expected: np.ndarray,
    tolerance: Any,
    row_ids: np.ndarray | None = None,
) -> Iterator[str]:
    """Yields a text on the rows that differ, if there are any.

    Args:
      place: name of the array and of its rows.
      found: values found, `[rows, ...]`.
      expected: values of the reference, of the same shape.
      tolerance: largest difference of an element, or `_SAME_BITS`. NaN always differs.
      row_ids: row ids to print; None: rows are numbered.
    """
    if found.shape != expected.shape:
        yield f"{place}: the shape must be {expected.shape}, got {found.shape}"
        return
    if tolerance is _SAME_BITS:
        is_wrong = found.view(np.int32) != expected.view(np.int32)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            is_wrong = ~(np.abs(found - expected) <= tolerance)
    is_wrong = is_wrong.reshape(len(found), -1)
    wrong = np.flatnonzero(is_wrong.any(axis=1))
    if not wrong.size:
        return
    first = wrong[0]
    start = int(np.argmax(is_wrong[first]))
    shown = slice(start, start + _NUM_SHOWN)
    got, wanted = (np.ravel(x[first]) for x in (found, expected))
    row = first if row_ids is None else row_ids[first]
    yield (
        f"{place} {row}, from element {start}: expected {_text(wanted[shown])}, got "
        f"{_text(got[shown])}; "
        f"{len(wrong)} of {len(found)} rows differ"
    )


def _text(values: np.ndarray) -> str:
    return " ".join(f"{value:.9g}" for value in values)
