"""Plans the features: which rows they read, and which features a batch holds.

An `EmbeddingPlan` holds devices and user functions, so it cannot be pickled. Loader
processes receive an `InputPlan`, with only what they need to prepare a batch.
"""

import contextlib
import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from tpu_embedding.argument_checks import about, describe_value, invalid
from tpu_embedding.config import Combiner, FeatureConfig, TableConfig
from tpu_embedding.vocabularies import VocabularyInputs

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import StackPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """A feature, and the place of its table in a stack.

    Attributes:
      row_offset: stack row where the table begins.
      num_rows: rows of the table in the stack, including spare rows.
    """

    name: str
    config: FeatureConfig
    stack_index: int
    row_offset: int
    num_rows: int

    @property
    def table(self) -> TableConfig:
        return self.config.table

    @property
    def inputs(self) -> VocabularyInputs:
        return self.config.table.vocabulary.inputs

    @property
    def combiner(self) -> Combiner:
        return self.config.combiner or self.table.combiner

    @property
    def says_combiner(self) -> bool:
        """True if the user set a combiner for the feature or the table."""
        return self.config.combiner is not None or self.table.says_combiner


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureNest:
    """The user's nest of features, as leaves in order and a tree structure."""

    features: tuple[FeaturePlan, ...]
    feature_tree: Any

    def is_for(self, feature_config: Any) -> bool:
        """Tells if the plan was made from this nest of features."""
        configs = [feature.config for feature in self.features]
        return jax.tree.flatten(feature_config) == (configs, self.feature_tree)

    def match(self, batch: Any, what: str = "features") -> tuple[Self, list[Any]]:
        """Selects the features that a batch holds, and flattens the batch.

        Args:
          batch: nest like `feature_config`, whose dicts may lack keys.
          what: name for the batch in errors.

        Returns:
          Two values: a plan with only these features, and the batch as a list with one
          leaf per feature. If the batch holds all features, the plan is this plan.

        Raises:
          ValueError: if the nest has a different structure or no features.
        """
        with contextlib.suppress(ValueError, TypeError):
            return self, self.feature_tree.flatten_up_to(batch)
        nest = self.unflatten(self.features)
        try:
            features, tree = jax.tree.flatten(_subset_of(nest, batch))
        except (KeyError, ValueError, TypeError) as error:
            reason = error.args[0]
            if not isinstance(error, KeyError) and (len(reason) > 80 or "\n" in reason):
                reason = ""  # JAX's reason may hold whole arrays.
            raise self._structure_error(batch, what, reason) from None
        if not features:
            raise self._structure_error(batch, what, "Pass at least one feature.")
        plan = dataclasses.replace(self, features=tuple(features), feature_tree=tree)
        return plan, plan.flatten(batch, what)

    def flatten(self, nest: Any, what: str = "features") -> list[Any]:
        """Flattens a nest like `feature_config` into one leaf per feature.

        Raises:
          ValueError: if the nest has a different structure.
        """
        try:
            return self.feature_tree.flatten_up_to(nest)
        except (ValueError, TypeError):
            raise self._structure_error(nest, what, "") from None

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Builds the nest from one leaf per feature. Inverts `flatten`."""
        return jax.tree.unflatten(self.feature_tree, leaves)

    def _structure_error(self, nest: Any, what: str, reason: str) -> ValueError:
        config = self.unflatten([feature.config for feature in self.features])
        rule = f"have the structure of feature_config, {describe_value(config)}"
        return invalid(what, rule, nest, reason)


def flatten_config(feature_config: Any) -> tuple[dict[str, FeatureConfig], Any]:
    """Names each `FeatureConfig` in a nest, by its path if it has no name.

    Names must be unique, and the nest must not be empty.
    """
    # A plan passed by mistake is a pytree without leaves. Treat it as a leaf, so that
    # it gets an error that shows the fix.
    with_paths, tree = jax.tree_util.tree_flatten_with_path(
        feature_config, is_leaf=lambda x: isinstance(x, FeatureNest)
    )
    if not with_paths:
        rule = "hold at least one FeatureConfig"
        raise invalid("feature_config", rule, feature_config)
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "feature", leaf)
        for path, leaf in with_paths
    ]
    for path, leaf in leaves:
        if not isinstance(leaf, FeatureConfig):
            fix = "Write {'movie': te.FeatureConfig(table=table)}."
            if isinstance(leaf, FeatureNest):
                fix = "Pass a plan by name: plan=plan."
            elif isinstance(leaf, TableConfig):
                fix = "Write te.FeatureConfig(table=table)."
            rule = f"be a nest of FeatureConfig, also at {path!r}"
            raise invalid("feature_config", rule, leaf, fix)
    features: dict[str, FeatureConfig] = {}
    paths: dict[str, str] = {}
    for path, config in leaves:
        name = config.name or path
        if name in features:
            rule = f"be unique, also at {paths[name]!r} and {path!r} of feature_config"
            raise invalid("FeatureConfig.name", rule, name)
        features[name], paths[name] = config, path
    return features, tree


def plan_features(
    features: Mapping[str, FeatureConfig],
    table_names: Sequence[str],
    stacks: Sequence["StackPlan"],
) -> tuple[FeaturePlan, ...]:
    tables = {t.name: (i, t) for i, stack in enumerate(stacks) for t in stack.tables}
    plans = []
    for (name, config), table_name in zip(features.items(), table_names, strict=True):
        stack_index, table = tables[table_name]
        plans.append(
            FeaturePlan(
                name=name,
                config=config,
                stack_index=stack_index,
                row_offset=table.row_offset,
                num_rows=table.num_rows,
            )
        )
    return tuple(plans)


def find_tables(
    features: Mapping[str, FeatureConfig], stacks: Sequence["StackPlan"]
) -> list[str]:
    """Finds each feature's table name. Each feature must match exactly one table."""
    tables = [(table.name, table.config) for s in stacks for table in s.tables]
    names, problems = [], []
    for owner, feature in features.items():
        table = feature.table
        # Unnamed tables may be equal, so the same object takes precedence. Comparing
        # with `==` is for configs that were built again.
        same = [name for name, config in tables if config is table] or [
            name for name, config in tables if config == table
        ]
        if len(same) != 1:
            problems.append(f"  {owner!r}: {table}")
        names += same[:1]
    if problems:
        known = "".join(f"\n  {name!r}: {config}" for name, config in tables)
        text = "The tables of these features must be tables of the plan:\n"
        text += "\n".join(problems) + f"\nThe plan has{known}\n"
        text += "Use the TableConfig objects that the plan was made from."
        raise about(ValueError(text), "feature_config", features)
    return names


def _subset_of(nest: Any, batch: Any) -> Any:
    """Drops features whose dict keys a batch lacks. Unknown keys raise KeyError."""
    if isinstance(nest, FeaturePlan):
        return nest
    make: Any = type(nest)
    if isinstance(nest, Mapping) and isinstance(batch, Mapping):
        unknown = [key for key in batch if key not in nest]
        if unknown:
            raise KeyError(
                f"Remove the keys {unknown}; there are only {reprlib.repr(list(nest))}."
            )
        return make({k: _subset_of(nest[k], batch[k]) for k in nest if k in batch})
    if isinstance(nest, list | tuple) and type(nest) is type(batch):
        if len(nest) == len(batch):
            children = [_subset_of(a, b) for a, b in zip(nest, batch, strict=True)]
            return make(*children) if hasattr(nest, "_fields") else make(children)
    # Other nodes must match exactly. If they don't, JAX's error says where.
    jax.tree.structure(nest).flatten_up_to(batch)
    return nest


def process_shards(processes: Sequence[int]) -> dict[int, range] | None:
    """Finds the range of sample shards that each process holds, one shard per device.

    `processes` has the process index for each device, in mesh order. The result is None
    if some process has scattered devices, or if processes have unequal device counts.

    Example:
      >>> process_shards([0, 0, 1, 1])
      {0: range(0, 2), 1: range(2, 4)}
    """
    size = len(processes) // len(set(processes))
    # Assume that each process has one run of devices, and that all runs are equally
    # long. The comparison below checks this assumption.
    shards = {
        processes[start]: range(start, start + size)
        for start in range(0, len(processes), size)
    }
    expected = [process for process, shard in shards.items() for _ in shard]
    return shards if expected == list(processes) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputPlan(FeatureNest):
    """The part of an `EmbeddingPlan` that `prepare_features` reads.

    `EmbeddingPlan.for_loaders` makes it. You can pickle it if your nest of features can
    be pickled. The process that receives it doesn't start devices.

    Attributes:
      features: one plan per feature, in leaf order. Tables lack initializers and
        optimizers.
      feature_tree: structure of your nest.
      num_shards: device count.
      num_process_parts: see `EmbeddingPlan`.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> mesh = te.device_mesh(jax.devices()[:1])
      >>> te.make_plan({"watched": te.FeatureConfig(table=table)}, mesh).for_loaders()
      InputPlan(1 features, 1 shards)
    """

    num_shards: int
    num_process_parts: int | None = 1

    def __repr__(self) -> str:
        return f"InputPlan({len(self.features)} features, {self.num_shards} shards)"

    def __reduce__(self):
        # JAX can pickle a tree structure only if all containers are built into JAX. So
        # a nest of numbers is pickled instead.
        numbers = self.unflatten(range(len(self.features)))
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restore, ({**fields, "feature_tree": numbers},)


def _restore(fields: dict[str, Any]) -> InputPlan:
    tree = jax.tree.structure(fields["feature_tree"])
    return InputPlan(**{**fields, "feature_tree": tree})
