"""The plan: every fact that is fixed before a step.

Stages of the lookup and the update receive arrays and the plan, and no other facts. A
plan is frozen and hashable, so it can be static under `jit`, and prints itself as a
table. `make_plan.py` makes it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embedding.argument_checks import ArgumentType
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan import memory
from tpu_embedding.plan.description import describe, summarize
from tpu_embedding.plan.features import (
    FeatureNest,
    find_tables,
    flatten_config,
    plan_features,
    process_shards,
)
from tpu_embedding.plan.input_plan import InputPlan, without_functions
from tpu_embedding.plan.stack_plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import LANE_BYTES
from tpu_embedding.types import AxisSize


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPlan(FeatureNest):
    """Everything about an embedding layer that is fixed before the step.

    As a static pytree, it can be an argument of a function under `jax.jit`.

    Attributes:
      stacks: the stacked tables.
      features: one per lookup, in the order of the leaves of the user's nest.
      feature_tree: the nest.
      mesh: devices of the tables, the batches and the dense model.
      hardware: hardware of the mesh's devices.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> plan.stacks[0].num_rows
      1000
    """

    stacks: tuple[StackPlan, ...]
    mesh: Mesh
    hardware: HardwareInfo

    @property
    def num_shards(self) -> int:
        """Devices of the mesh, each of which looks up an equal share of the samples."""
        return self.mesh.size

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """All mesh axes: samples are split over the devices in this order."""
        return tuple(self.mesh.axis_names)

    @property
    def sample_spec(self) -> PartitionSpec:
        """Partition of the first axis over all devices, in the order of samples."""
        return PartitionSpec(self.sample_axes)

    def rows_sharding(self, stack: StackPlan) -> NamedSharding:
        """Returns the sharding of a stacked table and of its slot variables."""
        return NamedSharding(self.mesh, stack.rows_spec)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batches, activations and cotangents, along their first axis."""
        return NamedSharding(self.mesh, self.sample_spec)

    def sharding_of_samples(self, shape: Sequence[AxisSize]) -> NamedSharding:
        """Returns the sharding of an array of samples, such as an activation.

        It is split along its first axis if the devices divide it, and else whole.

        Args:
          shape: shape of the global array.
        """
        divides = len(shape) > 0 and shape[0] % self.num_shards == 0
        return self.batch_sharding if divides else self.replicated

    def process_samples(
        self, batch_size: int, process_index: int | None = None
    ) -> range:
        """Returns the samples of a global batch that one process has to load.

        They are the samples that lie on its devices. Every process loads all samples if
        the devices of the mesh do not divide the batch, or if the samples of some
        process are not consecutive.

        Args:
          batch_size: samples of the global batch.
          process_index: number of the process; None: this one.

        Example:
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> plan.process_samples(64)  # one process has them all
          range(0, 64)
        """
        if process_index is None:
            process_index = jax.process_index()
        shards = self._process_shards
        if shards is None or batch_size % self.num_shards:
            return range(batch_size)
        size = batch_size // self.num_shards
        held = shards[process_index]
        return range(held.start * size, held.stop * size)

    @property
    def num_process_parts(self) -> int | None:
        """Parts of a batch that different processes load, from `process_samples`.

        None if the devices of some process are not consecutive in the mesh. Each
        process then loads the global batch.
        """
        return None if self._process_shards is None else len(self._process_shards)

    @property
    def _process_shards(self) -> dict[int, range] | None:
        devices = self.mesh.devices.flat
        return process_shards([device.process_index for device in devices])

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA options for `jax.jit(..., compiler_options=)` of a train step."""
        return dict(self.hardware.compiler_options)

    @property
    def table_bytes_per_device(self) -> int:
        """Memory that the tables take on each device, padding and ids included."""
        return sum(
            memory.rows_bytes(s.layout, self.hardware, LANE_BYTES)
            + s.vocabulary.stacks.bytes_per_device(s, self.hardware)
            for s in self.stacks
        )

    @property
    def slot_bytes_per_device(self) -> int:
        """Memory that the slot variables take on each device, padding included."""
        return sum(self.slot_bytes_of(stack) for stack in self.stacks)

    def slot_bytes_of(self, stack: StackPlan) -> int:
        """Memory that the slot variables of one stack take on each device."""
        _, *slots = memory.array_sizes(stack.layout, stack.slots, self.hardware)
        return sum(slots)

    @property
    def trained_stacks(self) -> tuple[TrainedStackPlan, ...]:
        """The stacks that have an optimizer."""
        return tuple(s for s in self.stacks if isinstance(s, TrainedStackPlan))

    @property
    def used_stacks(self) -> tuple[StackPlan, ...]:
        """The stacks that some feature looks up in."""
        used = {feature.stack_index for feature in self.features}
        return tuple(s for i, s in enumerate(self.stacks) if i in used)

    def features_of(self, stack: StackPlan) -> tuple[int, ...]:
        """Returns the indices of the features that look up in a stack."""
        return tuple(
            i
            for i, feature in enumerate(self.features)
            if self.stacks[feature.stack_index] is stack
        )

    def with_features(self, feature_config: Any) -> "EmbeddingPlan":
        """Returns a plan with other features on the same tables.

        Both plans read the same arrays. Use it to look up features in evaluation that
        the model was not trained with.

        Args:
          feature_config: any nest of `FeatureConfig`, whose tables are tables of this
            plan. Stacks that no feature uses are not looked up.

        Raises:
          ValueError: if a table is none of this plan's, or the features contradict
            each other.

        Example:
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> candidates = te.FeatureConfig(table=table, max_sequence_length=8)
          >>> [f.name for f in plan.with_features({"shown": candidates}).features]
          ['shown']
        """
        features, tree = flatten_config(feature_config)
        table_names = find_tables(features, self.stacks)
        return dataclasses.replace(
            self,
            features=plan_features(features, table_names, self.stacks),
            feature_tree=tree,
        )

    def for_loaders(self) -> InputPlan:
        """Returns the part that `prepare_features` needs, for loader processes.

        It can be pickled; a plan holds devices, and cannot.

        Example:
          >>> import pickle
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> received = pickle.loads(pickle.dumps(plan.for_loaders()))
          >>> batch = te.inputs.prepare_features({"watched": [3, 5]}, received)
          >>> batch["watched"].tolist()
          [3, 5]
        """
        return InputPlan(
            features=tuple(map(without_functions, self.features)),
            feature_tree=self.feature_tree,
            num_shards=self.num_shards,
            num_process_parts=self.num_process_parts,
        )

    def __reduce__(self):
        raise TypeError(
            "An EmbeddingPlan holds devices and cannot be pickled; send "
            "plan.for_loaders() to loader processes, which prepare_features takes."
        )

    def __copy__(self) -> "EmbeddingPlan":
        return self

    def __deepcopy__(self, memo: Any) -> "EmbeddingPlan":
        return self

    def __repr__(self) -> str:
        return f"EmbeddingPlan({summarize(self)}; print(plan) shows it all)"

    def __str__(self) -> str:
        return describe(self)


AnyPlan = EmbeddingPlan | InputPlan
"""A plan, or the part of it that loaders need."""


PLAN: Final = ArgumentType(
    EmbeddingPlan, "an EmbeddingPlan, from te.make_plan or the plan of a layer"
)
"""The argument `plan` of public functions."""
