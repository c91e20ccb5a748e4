"""Finds the slot variables of a source that mean the same here.

A source names its slot variables, and never the rule that made them. Slot variables are
taken over if the table's optimizer is of a rule that the source's library has, and the
source has exactly the slot variables of this rule.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tpu_embedding.checkpoint.imports.source import SourceTable, TableSource

RULES: Final[Mapping[str, str]] = {
    "ScaleByAdagradState": "adagrad",
    "ScaleByAdagradMomentumState": "adagrad_momentum",
    "ScaleByAdamState": "adam",
    "ScaleByCorrectedMomentsState": "moments",
    "FTRLState": "ftrl",
}
"""Type of the state that a rule keeps, to the name of the rule.

The row-wise form of a rule has the same name: its slot variables have another shape.
`moments` are those of Adam in the rules `lamb`, `partial_rowwise_adam` and
`partial_rowwise_lamb`.
"""


def rule_of(state: Any) -> str | None:
    """Returns the name of the rule that keeps a state, if other libraries have it.

    Args:
      state: optimizer state of a stack.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> rule_of(te.optimizers.adagrad(0.1).init(jnp.ones((2, 3))))
      'adagrad'
    """
    found = [RULES[name] for name in _type_names(state) if name in RULES]
    return found[0] if len(found) == 1 else None


def _type_names(state: Any) -> Iterator[str]:
    if hasattr(state, "_fields"):
        yield type(state).__name__
    parts = state.values() if isinstance(state, dict) else state
    if isinstance(state, dict | list | tuple):
        for part in parts:
            yield from _type_names(part)


def same_slots(
    source: TableSource, table: SourceTable, rule: str | None, own_names: list[str]
) -> dict[str, str]:
    """Returns the slots that a source and a rule share: own name to source's name.

    Args:
      source: owner of the table.
      table: with the source's slot variables.
      rule: from `rule_of`.
      own_names: slot variables of the optimizer.

    Returns:
      All slot variables of the rule, or nothing.
    """
    if source.rules is None:
        return {name: name for name in own_names if name in table.slots}
    for candidate in source.rules:
        if (
            candidate.rule == rule
            and set(candidate.names) == set(own_names)
            and set(candidate.names.values()) == set(table.slots)
        ):
            return dict(candidate.names)
    return {}
