"""The Flax NNX layer: tables as variables, and lookups.

`tpu_embedding.functional` does the arithmetic. The layer answers a call in one of three
ways. Inside a loss, it records the lookup (see `recording.py`). Inside an exported
program, it looks up rows in whole tables. Otherwise it does a plain lookup.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx import reprlib
from flax.nnx.bridge.wrappers import current_linen_module
from flax.nnx.visualization import render_object_constructor
from jax.core import Tracer
from jax.sharding import Mesh

from tpu_embedding import functional
from tpu_embedding.argument_checks import ArgumentType, check_type, invalid, right_names
from tpu_embedding.config import placement_of_embedding_feature
from tpu_embedding.functional.derived_state import check_has_slots
from tpu_embedding.functional.serving_lookup import serve
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import Samples, prepare_features
from tpu_embedding.inputs.shard_inputs import Batch, parse_batch
from tpu_embedding.nn.recording import (
    CALL_OUTSIDE,
    Recorder,
    answer_call,
    is_differentiated,
    is_mapped,
    recorder_of_trace,
    replicate_on_mesh,
    without_derivative,
)
from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables
from tpu_embedding.tables.table_values import check_values, unstack_tables
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.types import LookupStats


def no_stats(plan: EmbeddingPlan) -> LookupStats:
    """Makes zero counts for every stack and feature."""
    return LookupStats(
        rounds={stack.name: jnp.int32(0) for stack in plan.stacks},
        out_of_range={feature.name: jnp.int32(0) for feature in plan.features},
        num_ids={stack.name: jnp.int32(0) for stack in plan.stacks if stack.sends_ids},
        requested_rows={
            stack.name: jnp.zeros(stack.num_shards, jnp.int32)
            for stack in plan.stacks
            if stack.sends_ids
        },
        missing_rows={
            stack.name: jnp.int32(0)
            for stack in plan.stacks
            if not stack.storage.holds_all_rows
        },
    )


def warn_of_pooled_ids(batch: Batch, stacklevel: int) -> None:
    """Warns about ids `[batch, n]` if neither feature nor table sets a combiner.

    For such ids, `nnx.Embed` returns `[batch, n, dim]`, but the layer returns
    `[batch, dim]`.
    """
    features = batch.plan.features
    if all(x.says_combiner for x in features) or is_mapped(batch.leaves):
        return
    for feature, ids in zip(features, batch.leaves, strict=True):
        config = feature.config
        is_sequence = config.max_sequence_length or config.output_shape is not None
        is_matrix = isinstance(ids, jax.Array | np.ndarray) and ids.ndim == 2
        if feature.says_combiner or is_sequence or not is_matrix or ids.shape[1] < 2:
            continue
        # Ids padded with negative numbers are bags, which users want pooled.
        if isinstance(ids, np.ndarray) and ids.dtype.kind == "i" and np.any(ids < 0):
            continue
        num_samples, length = ids.shape
        dim = feature.table.dim
        warnings.warn(
            f"Feature {feature.name!r} has ids of shape [{num_samples}, {length}], so "
            f"its activations [{num_samples}, {dim}] are means of {length} rows. For "
            f"one row per id, [{num_samples}, {length}, {dim}] as in nnx.Embed, write "
            f"te.FeatureConfig(table=table, max_sequence_length={length}). To keep the "
            "mean, write te.FeatureConfig(table=table, combiner='mean').",
            stacklevel=stacklevel + 1,
        )


class ShortRepr(nnx.Module):
    """A module that prints facts about its tables instead of all its variables."""

    # Flax prints every attribute, and a plan prints a kilobyte per feature.

    def _repr_facts(self) -> Mapping[str, Any]:
        """Names the facts that `print` and `nnx.display` show."""
        raise NotImplementedError

    def __nnx_repr__(self) -> Iterator[Any]:
        all_parts = super().__nnx_repr__()
        yield next(all_parts)  # the type, and the sizes of the variables
        all_parts.close()
        for name, fact in self._repr_facts().items():
            yield reprlib.Attr(name, fact, use_raw_value=isinstance(fact, str))

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_object_constructor(
            object_type=type(self),
            attributes=self._repr_facts(),
            path=path,
            subtree_renderer=subtree_renderer,
        )


Recording = Literal["off", "recording", "serving"]
"""How a layer answers a call:

* `"off"`: with a lookup.
* `"recording"`: with `recording.answer_call`, inside a loss.
* `"serving"`: with a lookup in whole tables, inside an exported program.
"""

USE_VALUE_AND_GRAD: Final = (
    "nnx.grad skips the tables of a TPUEmbedding. Use te.Optimizer, and "
    "te.value_and_grad(loss_fn)(model, ...), with wrt=nnx.PathContains('head') for a "
    "part. For gradients of another argument, close over the model: "
    "nnx.grad(lambda x: loss_fn(model, x))(x)."
)
NO_DERIVATIVE: Final = (
    "The tables of a TPUEmbedding have no dense derivative. Use "
    "te.value_and_grad, whose `wrt` selects only dense parameters."
)


RNGS: Final = ArgumentType(nnx.Rngs, "an nnx.Rngs")


class EmbeddingTables(nnx.Variable):
    """Stacked tables in a layer: stack name to `PackedRows`.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> _, tables, others = nnx.split(layer, te.nn.EmbeddingTables, ...)
      >>> list(tables)
      ['tables']
    """


class LookupStatsVariable(nnx.Variable):
    """`LookupStats` from the latest lookup in a layer.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> feature = te.FeatureConfig(table=table, name="watched")
      >>> layer = te.TPUEmbedding(feature, rngs=nnx.Rngs(0))
      >>> _ = layer(jnp.array([1, 2, 99]))
      >>> stats = nnx.state(layer, te.nn.LookupStatsVariable)["stats"]
      >>> int(stats.out_of_range["watched"])
      1
    """


class DynamicStatsVariable(nnx.Variable):
    """`DynamicStats` from the latest `insert_ids`, by table name."""


class RecordedCalls(nnx.Variable):
    """Values that a layer keeps only during one loss, export or pipelined step."""


LAYER_VARIABLES: Final = (
    DynamicStatsVariable,
    EmbeddingTables,
    LookupStatsVariable,
    RecordedCalls,
)
"""Variables of embedding layers."""


class LayerBufferSizes(BufferSizes):
    """Buffer sizes that a layer keeps on the host. Compiled steps ignore them."""

    # All objects compare equal. Otherwise, a second model with the same plan would
    # compile every step again. As a side effect, Flax gives the second model the
    # attributes of the model that was compiled, so the two models share one object.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerBufferSizes)

    def __hash__(self) -> int:
        return hash(LayerBufferSizes)


_MAKE_FEATURES: Final = (
    "feature_config={'movie': te.FeatureConfig(table=te.TableConfig("
    "vocabulary_size=..., dim=...))}"
)
_TABLE_FIELDS: Final = ("num_embeddings", "vocabulary_size", "embedding_dim", "dim")
_ATTRIBUTES: Final = {
    "attend": "for scores of some rows, write queries @ layer(features)['movie'].T",
    "embedding": "layer.embedding_tables()['movie'] is the table as a NumPy array, and "
    "layer.set_embedding_tables({'movie': array}) sets it",
    "features": "layer.plan.features lists features, and print(layer.plan) shows dims",
    "num_embeddings": "print(layer.plan) shows the rows of each table",
}
"""Attributes of other libraries' layers, and what to use instead."""


@right_names(features="feature_config", **dict.fromkeys(_TABLE_FIELDS, _MAKE_FEATURES))
class TPUEmbedding(ShortRepr):
    """Embedding tables sharded over a mesh, for lookups inside any `nnx.Module`.

    Call it with a batch in the same nest as your `feature_config`. Train it with
    `te.value_and_grad` and `te.Optimizer`. Note that the tables are
    `te.nn.EmbeddingTables`, not `nnx.Param`, so `nnx.state(model, nnx.Param)` leaves
    them out. Four tasks need different code than for dense parameters:

    * moving averages: `te.optimizers.with_ema(rule)`, then
      `te.Optimizer.finalize_variable_values` on a copy;
    * checkpoints: `te.save(directory, (model, optimizer))`;
    * weight norm:
      `optax.tree.norm(nnx.state(model, (nnx.Param, te.nn.EmbeddingTables)))`;
    * parameter count: add `vocabulary_size * dim` per table.

    Attributes:
      plan: stacking, sharding and packing; `print(layer.plan)` shows it.
      tables: the stacked tables.
      stats: rounds, out-of-range ids and other counts from the latest lookup.
      dynamic_stats: hits, new ids and evictions per table from the latest
        `insert_ids`; only with dynamic tables.
      buffer_sizes: sizes of ragged features, remembered by `prepare`.
      tables_with_derived_state: names of tables whose optimizer derives state from
        their values. For these tables, you must set values and state together.

    Example:
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     {"watched": te.FeatureConfig(table=table)},
      ...     te.optimizers.adagrad(0.1),
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> layer({"watched": np.array([1, 2, 3])})["watched"].shape
      (3, 4)
    """

    @moves_arrays
    def __init__(
        self,
        feature_config: Any,
        optimizer: TableOptimizer | None = None,
        *,
        mesh: Mesh | None = None,
        plan: EmbeddingPlan | None = None,
        embedding_feature: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        rngs: nnx.Rngs,
    ):
        """Makes the plan and the initial tables.

        Args:
          feature_config: nest of `FeatureConfig`. Activations have the same nest. May
            be None if you pass a `plan`.
          optimizer: trains all tables without an optimizer in their `TableConfig`. Pass
            a row-local optax transformation, a `tpu_embedding.optimizers` rule, a name,
            or a Keras optimizer. Without it, these tables are not trained.
          mesh: devices to shard tables and batch over. Defaults to all devices, on one
            axis.
          plan: from `make_plan` with the same `feature_config`. It replaces `optimizer`
            and `mesh`, and has more options.
          embedding_feature: `"UNSUPPORTED"`, `"V1"` or `"V2"` as in TensorFlow, or the
            enum member. `"UNSUPPORTED"` replicates all tables. `"V1"` and `"V2"` shard
            them. Not allowed with a `plan`, which sets the placement.
          pipeline_execution_with_tensor_core: a TensorFlow argument. Must be False. For
            pipelining, see `tpu_embedding.PipelinedTrainStep`.
          rngs: provides the key for the tables, from its stream `params`.

        Raises:
          TypeError: if an argument has the wrong type.
          ValueError: if the configuration contradicts itself, or the layer is made
            inside a Linen module.
        """
        if isinstance(feature_config, int):  # as nnx.Embed(1_000, 16)
            owner, line = "te.TPUEmbedding: feature_config", f"Write {_MAKE_FEATURES}."
            rule = "be a nest of te.FeatureConfig"
            raise invalid(owner, rule, feature_config, line, TypeError)
        _check_arguments(pipeline_execution_with_tensor_core, rngs)
        if plan is None:
            placement = placement_of_embedding_feature(embedding_feature)
            plan = make_plan(
                feature_config, mesh, optimizer=optimizer, placement=placement
            )
        else:
            line = "te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))"
            check_type("te.TPUEmbedding: plan", PLAN, plan, line)
            if (optimizer, mesh, embedding_feature) != (None, None, None):
                raise ValueError(
                    "TPUEmbedding got a plan together with optimizer, mesh or "
                    "embedding_feature; pass them to make_plan, whose placement "
                    "replaces embedding_feature."
                )
            if feature_config is not None and not plan.is_for(feature_config):
                raise ValueError(
                    "TPUEmbedding's plan must have been made from the same "
                    f"feature_config, got\n  {feature_config}\nand a plan for "
                    f"{plan.feature_tree}."
                )
        self.plan = plan
        self.tables = EmbeddingTables(init_tables(plan, rngs.params()))
        self.stats = LookupStatsVariable(replicate_on_mesh(no_stats(plan), plan))
        counts = {
            table.name: stack.vocabulary.stacks.zero_counts
            for stack in plan.stacks
            for table in stack.tables
            if stack.vocabulary.stacks.zero_counts is not None
        }
        if counts:
            self.dynamic_stats = DynamicStatsVariable(replicate_on_mesh(counts, plan))
        self.buffer_sizes = LayerBufferSizes()
        # `te.Optimizer` sets it. Names compare by value, so models with equal plans
        # share compiled steps.
        self.tables_with_derived_state: frozenset[str] = frozenset()
        # Inside `te.value_and_grad` or an export, `recorded` holds taps or tables, then
        # the records of calls in inner transformations.
        self.recorded = RecordedCalls(())
        # Inside a pipelined step, `prefetched` holds features and the result of their
        # lookup until a call uses it. Afterwards, `features_agree` holds whether that
        # call had the same features.
        self.prefetched = RecordedCalls(())
        self.features_agree = RecordedCalls(())
        self.recording: Recording = "off"
        # The layer's path in the recorded model and the recorder's number are equal for
        # all copies of the layer.
        self.path, self.recorder_number = "", 0

    def __call__(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Looks up a batch.

        Args:
          features: nest like `feature_config`; you can omit dict keys. See
            `tpu_embedding.functional.lookup`.
          weights: the same nest with an array or None per dense feature. If your
            features are ragged, pass their weights to `prepare` instead.
          serving_config: nest of `FeatureConfig` for the same tables, which replaces
            `feature_config` in this call. `stats` ignores features with other names.

        Returns:
          Global float32 activations in the nest of the features. Their shape is
          `[batch, dim]`, unless a feature sets a sequence length or an output shape.

        Raises:
          TypeError, ValueError: if the dtype or shape of a feature does not fit its
            config.
        """
        plan = self.plan
        if serving_config is not None:
            plan = plan.with_features(serving_config)
        is_served = self.recording == "serving"
        batch = parse_batch(features, plan, weights, serving=is_served)
        if not is_served:
            warn_of_pooled_ids(batch, stacklevel=2)
        if self.recording != "off":
            return self._record_call(batch)
        # Fixed tables lose nothing in `nnx.grad`, so raise only for trained tables.
        if self.plan.trained_stacks and self._is_differentiated():
            raise ValueError(USE_VALUE_AND_GRAD)
        result = self._look_up(batch)
        self._keep_stats(result.stats)
        return result.activations

    if not TYPE_CHECKING:  # Type checkers would take any name.

        def __getattr__(self, name: str) -> Any:
            """Adds a hint to the error if other libraries have the attribute."""
            text = f"'TPUEmbedding' object has no attribute {name!r}"
            if name in _ATTRIBUTES:
                text = f"{text}: {_ATTRIBUTES[name]}."
            raise AttributeError(text, name=name, obj=self)

    def __getitem__(self, name: Any) -> Any:
        raise TypeError(
            f"A TPUEmbedding is not a dict of tables, got [{name!r}]: "
            f"layer.embedding_tables()[{name!r}] is the table as a NumPy array, and "
            f"layer(features)[{name!r}] the activations of a feature."
        )

    def _repr_facts(self) -> dict[str, Any]:
        return {"plan": repr(self.plan)}

    def expand(self, values: jax.Array, index: Any) -> Any:
        """Gathers values of unique ids into sample positions.

        Calls `te.functional.expand` on the layer devices, or on one device in an
        exported model.

        Args:
          values: `[num_devices * size, ...]`, a value for each of the unique ids.
          index: from `te.inputs.unique_ids`.
        """
        plan = None if self.recording == "serving" else self.plan
        return functional.expand(values, index, plan)

    def _look_up(self, batch: Batch) -> functional.LookupResult:
        """Takes the lookup that a pipelined step prefetched, or looks up the batch."""
        if prefetched := self.prefetched.get_value():
            expected, result = prefetched
            self.prefetched.set_value(())
            leaves, structure = jax.tree.flatten(expected)
            features = batch.plan.unflatten(batch.leaves)
            call_leaves, call_structure = jax.tree.flatten(features)
            fits = structure == call_structure and all(
                jnp.shape(x) == jnp.shape(y)
                for x, y in zip(leaves, call_leaves, strict=True)
            )
            # Only the call that starts a pipeline reads the comparison. XLA removes it
            # from later steps. These look up again only if a shape differs.
            agrees = jnp.array(fits)
            if fits:
                equal = map(jnp.array_equal, leaves, call_leaves)
                agrees = jnp.all(jnp.array(list(equal)))
            recorder = recorder_of_trace(self.recorder_number)
            if recorder is None:  # Only a variable can leave an inner `nnx.jit`.
                self.features_agree.set_value((agrees,))
            elif self.path in recorder.agreements:
                fits = False  # Another copy of the layer has used the lookup.
            else:
                recorder.agreements[self.path] = agrees
            if fits:
                return result
        tables = without_derivative(NO_DERIVATIVE, self.tables.get_value())
        return functional.lookup(tables, batch, batch.plan)

    def _record_call(self, batch: Batch) -> Any:
        """Answers a call inside a loss or an exported program, and records it."""
        taps, *records = self.recorded.get_value()
        if self.recording == "serving":
            activations, record = serve(taps, batch)
            self.record(record)
            return activations
        look_up = functools.partial(self._look_up, batch)
        if recorder := recorder_of_trace(self.recorder_number):
            taps = recorder.taps_of(self.path, "outer")
            records = recorder.calls[self.path, "outer"]
        activations, stats = answer_call(taps, records, batch, look_up)
        if recorder is None:
            self.record(records[-1])
        if stats is not None:
            self._keep_stats(stats)
        return activations

    def record(self, record: Any) -> None:
        """Stores the record of a call, for all copies of the layer if possible.

        Raises:
          ValueError: if an inner transformation would lose the record.
        """
        recorder = recorder_of_trace(self.recorder_number)
        if recorder is not None:
            recorder.calls[self.path, "outer"].append(record)
            return
        # Only a variable can leave an inner transformation, and copies of the layer
        # don't share variables. A transformation that maps the call or hides the
        # variable loses the record.
        if is_mapped(record):
            raise ValueError(CALL_OUTSIDE)
        try:
            self.recorded.set_value((*self.recorded.get_value(), record))
        except TraceContextError as error:
            raise ValueError(CALL_OUTSIDE) from error

    def prepare(
        self,
        features: Any,
        weights: Any = None,
        serving_config: Any = None,
        *,
        samples: Samples = "global",
    ) -> Any:
        """Checks a batch on the host and pads it to static shapes.

        See `tpu_embedding.inputs.prepare_features`.

        Args:
          features: nest like `feature_config`; you can omit dict keys.
          weights: the same nest with weights or None per feature.
          serving_config: see `__call__`.
          samples: `"global"`, or `"process"` if you pass only the samples for this
            process.
        """
        plan = self.plan
        if serving_config is not None:
            plan = plan.with_features(serving_config)
        return prepare_features(
            features, plan, weights, self.buffer_sizes, samples=samples
        )

    def embedding_tables(self) -> dict[str, Any]:
        """Reads all tables as NumPy arrays `[vocabulary_size, dim]`, by name."""
        return unstack_tables(self.tables.get_value(), self.plan)

    def set_embedding_tables(self, values: dict[str, Any]) -> None:
        """Replaces the values of some tables.

        See `tpu_embedding.functional.with_table_values`.

        Args:
          values: table name to real numbers `[vocabulary_size, dim]`.

        Raises:
          TypeError: if `values` is not a dict.
          ValueError: if a table is unknown or an array does not fit. Also raised if an
            optimizer derives state from these values, as `adafactor` does. In this
            case, call `Optimizer.set_embedding_tables`.
        """
        check_values(values, self.plan)
        check_has_slots(
            self.tables_with_derived_state & set(values),
            "optimizer.set_embedding_tables(model, values)",
        )
        tables, _ = functional.with_table_values(
            self.tables.get_value(), values, self.plan, {}
        )
        self.tables.set_value(tables)

    def _is_differentiated(self) -> bool:
        """Tells if a function such as `nnx.grad` differentiates the layer's model."""
        # `nnx.grad` leaves out the tables, so they would never train. However, a
        # function that closes over the layer may be differentiated with respect to its
        # own arguments, such as id weights.
        if not is_differentiated():
            return False
        try:
            # Recording is already off, but Flax rejects the assignment if the layer is
            # from outside the differentiated function.
            self.recording = "off"
        except TraceContextError:
            return False
        return True

    def _keep_stats(self, stats: LookupStats) -> None:
        """Stores the stats, with an entry per stack and feature of the plan."""
        # If the structure depended on what a call looks up, a jitted step that takes
        # the layer would recompile.
        if is_mapped(stats):  # `nnx.vmap` would add an axis to the counts.
            return
        if stats.out_of_range.keys() != {x.name for x in self.plan.features}:
            zeros = no_stats(self.plan)
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stats)):
                # The counts of an eager lookup are on all devices.
                zeros = replicate_on_mesh(zeros, self.plan)
            stats = LookupStats(
                **{
                    field: {
                        name: getattr(stats, field).get(name, zero)
                        for name, zero in counts.items()
                    }
                    for field, counts in vars(zeros).items()
                }
            )
        # Variables of a layer that a JAX transformation closes over cannot change.
        with contextlib.suppress(TraceContextError):
            self.stats.set_value(stats)

    def start_recording(
        self,
        recording: Recording,
        path: str,
        recorder: Recorder,
        taps_or_tables: Any,
    ) -> None:
        """Starts recording calls.

        Args:
          recording: how to answer calls.
          path: layer path.
          recorder: an open recorder.
          taps_or_tables: taps for calls in inner transformations, or served tables.
        """
        self.recording = recording
        self.path, self.recorder_number = path, recorder.number
        self.recorded.set_value((taps_or_tables,))

    def stop_recording(self, recorder: Recorder) -> None:
        """Hands records from inner transformations to the recorder."""
        _, *inner_calls = self.recorded.get_value()
        recorder.calls[self.path, "inner"].extend(inner_calls)
        if self.path in recorder.agreements:
            agrees = (*self.features_agree.get_value(), recorder.agreements[self.path])
            self.features_agree.set_value((jnp.all(jnp.array(agrees)),))
        self.recording, self.path, self.recorder_number = "off", "", 0
        self.recorded.set_value(())
        self.prefetched.set_value(())


def _check_arguments(pipeline_execution_with_tensor_core: bool, rngs: Any) -> None:
    if current_linen_module() is not None:
        raise ValueError(
            "te.TPUEmbedding cannot be made inside a Linen module, such as "
            "nnx.bridge.ToLinen, which would make new tables in every call; use "
            "te.linen.TPUEmbedding(plan) there."
        )
    if pipeline_execution_with_tensor_core:
        raise invalid(
            "pipeline_execution_with_tensor_core",
            "be False, because a layer alone cannot look ahead",
            pipeline_execution_with_tensor_core,
            "Train with te.PipelinedTrainStep(loss_fn, features_of=..., "
            "mode='stale'), which computes what TensorFlow does, or with "
            "mode='exact'.",
        )
    line = "te.TPUEmbedding(feature_config, optimizer, rngs=nnx.Rngs(0))"
    check_type("te.TPUEmbedding: rngs", RNGS, rngs, line)
