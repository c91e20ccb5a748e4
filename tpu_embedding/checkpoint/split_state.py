"""Finds the embedding tables in whatever state the user trains.

Tables and slot variables are dicts by stack name, anywhere in modules or pytrees. They
are recognized by their keys and structure, so no marker is needed. `SplitState` pairs
the tables and slots of each layer, and puts new arrays back into the state. Saves,
restores and imports all start here.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.records import quote
from tpu_embedding.dynamic.directory import IdDirectory
from tpu_embedding.functional.steps import init_slots
from tpu_embedding.nn.embedding import (
    DynamicStatsVariable,
    LookupStatsVariable,
    RecordedCalls,
)
from tpu_embedding.nn.linen.variables import LayerTables
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.arithmetic_guard import GUARD_NAME
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.update.state import structure_of_state

_NOT_SAVED = (
    LookupStatsVariable,
    DynamicStatsVariable,
    RecordedCalls,
)
"""Layer variables that are not saved, because the plan determines them."""

_CONTAINERS = {"tables", "embedding_tables", "variables", "stacks", "slots", "value"}
"""Keys that lead to tables and slots, but are not part of the layer's path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerState:
    """Tables and slot variables in one embedding layer.

    Attributes:
      path: prefix for table names. Empty if the state has only one layer.
      tables: packed rows by stack name, and id directories by directory name.
      slots: optimizer states by stack name. None if the state has no optimizer.
      tables_with_derived_state: names of the tables whose values determine optimizer
        state. All modules with a layer at this path contribute names.
    """

    path: str
    plan: EmbeddingPlan
    tables: Mapping[str, Any]
    slots: Mapping[str, Any] | None
    tables_with_derived_state: frozenset[str] = frozenset()

    def name_of(self, table: str) -> str:
        return f"{self.path}/{table}" if self.path else table

    @property
    def names(self) -> dict[str, str]:
        """Table names in the layer, mapped to names in a checkpoint."""
        return {
            table.name: self.name_of(table.name)
            for stack in self.plan.stacks
            for table in stack.tables
        }


@dataclasses.dataclass(frozen=True)
class _Stacks:
    """A dict of tables or slots by stack name, and its position in the state."""

    index: int
    keys: tuple[str, ...]
    value: Mapping[str, Any]


class SplitState:
    """A state, split into embedding layers and other leaves."""

    def __init__(self, state: Any, plan: EmbeddingPlan | None = None):
        """Splits a state. Its leaves may be arrays or shapes."""
        self._state = state
        plans = _plans_of(state, plan)
        modules = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_module)
        modules = [(path, leaf) for path, leaf in modules if _is_module(leaf)]
        # A layer's path leaves out its module's position in the state, such as 0 for
        # the model in (model, optimizer).
        roots = [tuple(map(_key, path)) for path, _ in modules]
        derived: dict[str, frozenset[str]] = collections.defaultdict(frozenset)
        for _, module in modules:
            for layer_path, layer in embedding_layers(module).items():
                derived[layer_path] |= layer.tables_with_derived_state
        tree = jax.tree.map(
            lambda leaf: nnx.state(leaf) if _is_module(leaf) else leaf,
            state,
            is_leaf=_is_module,
        )
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(
            tree,
            is_leaf=lambda value: (
                isinstance(value, (PackedRows, *_NOT_SAVED))
                or _are_tables(value, plans.values())
                or _are_slots(value, plans.values())
            ),
        )
        self._leaves = [leaf for _, leaf in with_paths]
        self._dense_indices: dict[str, int] = {}
        tables, slots = [], []
        for i, (path, leaf) in enumerate(with_paths):
            keys = tuple(map(_key, path))
            root = next((r for r in roots if keys[: len(r)] == r), ())
            stacks = _Stacks(i, keys[len(root) :], leaf)
            if _are_tables(leaf, plans.values()) and "slots" not in keys:
                tables.append(stacks)
            elif _are_slots(leaf, plans.values()):
                slots.append(stacks)
            elif not isinstance(leaf, _NOT_SAVED):
                # Flax variables keep their array in the attribute `value`. But a key
                # `value` in a user's dict belongs to the path.
                is_boxed = path[-1:] == (jax.tree_util.GetAttrKey("value"),)
                self._add_dense(i, keys[:-1] if is_boxed else keys, leaf)
        pairs = _pairs(tables, slots)
        self._indices = [(t.index, s.index if s else None) for _, t, s in pairs]
        self.layers = [
            LayerState(
                path=path if len(pairs) > 1 else "",
                plan=_plan_of(path, own_tables.value, plans),
                tables=own_tables.value,
                slots=own_slots and own_slots.value,
                tables_with_derived_state=derived[path],
            )
            for path, own_tables, own_slots in pairs
        ]
        names = [name for layer in self.layers for name in layer.names.values()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"The state has several tables with the names {twice}. Save each model "
                "and its optimizer separately."
            )

    @property
    def dense(self) -> dict[str, Any]:
        """All leaves outside the layers, by path."""
        return {name: self._leaves[i] for name, i in self._dense_indices.items()}

    def _add_dense(self, index: int, keys: tuple[str, ...], leaf: Any) -> None:
        # A stack that was saved as a dense leaf could only be restored under the same
        # plan.
        if isinstance(leaf, PackedRows):
            raise ValueError(
                f"The state holds packed rows at {'.'.join(keys)!r} that don't belong "
                "to a known plan. Pass the plan they were made for as plan=, and whole "
                "dicts of tables and slots as init_tables and init_slots return them."
            )
        name = ".".join(map(quote, keys))
        if not (
            isinstance(leaf, bool | int | float)
            or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
        ):
            fix = "Pass texts and other JSON values as description=."
            fix = fix if name else "Write te.save(directory, state)."
            field = f"the state's leaf {name or 'without a name'}"
            raise invalid(field, "be an array or a real number", leaf, fix, TypeError)
        self._dense_indices[name] = index

    def rebuilt(self, layers: Sequence[LayerState], dense: Mapping[str, Any]) -> Any:
        """Puts new leaves into the state, and updates modules in place."""
        leaves = list(self._leaves)
        for (tables, slots), layer in zip(self._indices, layers, strict=True):
            leaves[tables] = layer.tables
            if slots is not None:
                leaves[slots] = layer.slots
        for name, leaf in dense.items():
            leaves[self._dense_indices[name]] = leaf
        # A restored model must not hold shapes, so unsaved variables become zeros.
        leaves = [
            jax.tree.map(_zeros, leaf) if isinstance(leaf, _NOT_SAVED) else leaf
            for leaf in leaves
        ]
        tree = jax.tree.unflatten(self._structure, leaves)
        nodes, structure = jax.tree.flatten(self._state, is_leaf=_is_module)
        new_nodes = structure.flatten_up_to(tree)
        for i, node in enumerate(nodes):
            if _is_module(node):
                nnx.update(node, new_nodes[i])
                new_nodes[i] = node
        return structure.unflatten(new_nodes)


def _plans_of(state: Any, plan: EmbeddingPlan | None) -> dict[str, EmbeddingPlan]:
    """Collects plans by layer path. The plan that the caller passed has the path ""."""
    plans = {} if plan is None else {"": plan}
    leaves = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: _is_module(x) or isinstance(x, LayerTables)
    )
    for path, leaf in leaves:
        if isinstance(leaf, Optimizer):
            continue
        if _is_module(leaf):
            layers = embedding_layers(leaf)
            plans |= {name: layer.plan for name, layer in layers.items()}
        elif isinstance(leaf, LayerTables):
            plans[_layer_path(tuple(map(_key, path)))] = leaf.plan
    return plans


def _plan_of(
    path: str, tables: Mapping[str, Any], plans: Mapping[str, EmbeddingPlan]
) -> EmbeddingPlan:
    """Chooses a plan that fits the tables, preferably the one at the layer path."""
    fitting = {p: plan for p, plan in plans.items() if _are_tables(tables, [plan])}
    return fitting.get(path) or next(iter(fitting.values()))


def _pairs(
    tables: Sequence[_Stacks], slots: Sequence[_Stacks]
) -> list[tuple[str, _Stacks, _Stacks | None]]:
    if len(tables) == len(slots) == 1:
        return [(_layer_path(tables[0].keys), tables[0], slots[0])]
    pairs = []
    for own_tables in tables:
        path = _layer_path(own_tables.keys)
        own_slots = [
            stacks
            for stacks in slots
            if f"/{path}".endswith(f"/{_layer_path(stacks.keys)}")
        ]
        pairs += [(path, own_tables, stacks) for stacks in own_slots or [None]]
    used = sorted(own_slots.index for _, _, own_slots in pairs if own_slots)
    if len(pairs) > len(tables) or used != sorted(stacks.index for stacks in slots):
        raise ValueError(
            f"The slots at {['.'.join(stacks.keys) for stacks in slots]} cannot be "
            "matched one to one with the tables at "
            f"{['.'.join(stacks.keys) for stacks in tables]}. Put a layer's tables and "
            "slots side by side, as {'user': {'tables': ..., 'slots': ...}}, or save "
            "each model and its optimizer separately."
        )
    return pairs


def _layer_path(keys: tuple[str, ...]) -> str:
    """Derives a layer path that is the same for tables and their slots."""
    # `te.Optimizer` maps layer paths to slots in a dict, so the last key is a path.
    if "slots" in keys[:-1] and keys[-1] not in _CONTAINERS:
        return keys[-1]
    if "slots" in keys and keys[-1] == "":
        return ""
    own_keys = [key for key in keys if key not in _CONTAINERS]
    # Drop the model's position in a tuple.
    while own_keys and own_keys[0].isdigit():
        own_keys = own_keys[1:]
    return "/".join(own_keys)


def _are_tables(value: Any, plans: Iterable[EmbeddingPlan]) -> bool:
    """Checks if a value is a dict of all tables and id directories in a plan."""
    if not isinstance(value, dict) or not value:
        return False
    for plan in plans:
        directories = {name for stack in plan.stacks for name in stack.array_names}
        if (
            set(value) - {GUARD_NAME}
            == {stack.name for stack in plan.stacks} | directories
            and all(
                isinstance(value[stack.name], PackedRows)
                and value[stack.name].layout == stack.layout
                for stack in plan.stacks
            )
            and all(isinstance(value[name], IdDirectory) for name in directories)
        ):
            return True
    return False


def _are_slots(value: Any, plans: Iterable[EmbeddingPlan]) -> bool:
    """Checks if a value is a dict of all slot variables in a plan."""
    if not isinstance(value, dict) or not value:
        return False
    # Names are not enough, because every plan has a `stack_0`. So the structure must
    # match as well.
    return any(
        set(value) == {stack.name for stack in plan.trained_stacks}
        and structure_of_state(value) == _slots_structure(plan)
        for plan in plans
    )


@functools.lru_cache(maxsize=64)
def _slots_structure(plan: EmbeddingPlan) -> Any:
    tables = jax.eval_shape(lambda: init_tables(plan, jax.random.key(0)))
    return structure_of_state(jax.eval_shape(lambda t: init_slots(t, plan), tables))


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def _key(entry: Any) -> str:
    return jax.tree_util.keystr((entry,), simple=True)


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    return leaf
