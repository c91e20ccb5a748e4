"""A train step that starts the lookup of the next batch while it computes this one.

One compiled program trains on a batch and begins the lookup of the batch after it. The
ids of that batch come from the loss itself: it is traced on the next batch, and all
that does not lead to ids is left out. So the model needs no change.

* `mode="exact"` moves the ids of the next batch early: flatten, dedup, route, and the
  exchange of ids. It reads rows after the update. Numbers equal those of a plain loop.
* `mode="stale"` also reads the rows early, before the update. Activations are one
  update old, as with TensorFlow's `pipeline_execution_with_tensor_core`.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.pipeline_program import (
    Batch,
    InFlight,
    PipelineMode,
    PipelineProgram,
)
from tpu_embedding.nn.training import Optimizer, embedding_layers, put_on_mesh


class PipelinedTrainStep:
    """A train step that begins the lookup of the next batch.

    Each call takes a new batch, and trains on the batch of the call before. So the
    model lags one batch behind: call `drain` before evaluation, before a checkpoint,
    and after the last batch.

    Call it outside of `jit`: it compiles the step itself, and donates model and
    optimizer. A steady stream of batches compiles three programs: one each for the
    first call, all others, and `drain`. A batch of another shape compiles again.

    Example:
      >>> import optax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = te.Optimizer(layer, optax.sgd(0.1))
      >>> pipeline = PipelinedTrainStep(lambda model, ids: jnp.sum(model(ids) ** 2))
      >>> pipeline(layer, optimizer, jnp.array([1, 2])) is None
      True
      >>> loss_of_first = pipeline(layer, optimizer, jnp.array([2, 3]))
      >>> loss_of_second = pipeline.drain(layer, optimizer)
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        *,
        mode: PipelineMode = "exact",
        wrt: nnx.filterlib.Filter = nnx.Param,
        has_aux: bool = False,
        transform_gradients: Callable[[Gradients], Gradients] | None = None,
        insert_ids: Callable[..., Any] | None = None,
        compiler_options: Mapping[str, str] | None = None,
    ):
        """Keeps the loss; nothing is compiled before the first call.

        Args:
          loss_fn: see `tpu_embedding.value_and_grad`. The features that it gives to
            the layers may depend on the batch, and on variables that training does not
            change. They may depend on no activation.
          mode: `"exact"` for the numbers of a plain loop, `"stale"` to read rows before
            the update of the batch before.
          wrt: filter of the dense parameters.
          has_aux: True if `loss_fn` returns a second value.
          transform_gradients: applied before the update, such as
            `lambda g: te.gradients.clip_by_global_norm(g, 1.0)`; None: nothing.
          insert_ids: `(model, optimizer, *args) -> args` for models with dynamic
            tables, in mode `"exact"`. It calls `optimizer.insert_ids`, and returns a
            tuple, the batch for `loss_fn`. It runs after the update of the batch
            before, as in a plain loop.
          compiler_options: options of XLA; None: those of the first layer's plan.

        Raises:
          ValueError: if the mode is unknown, or `"stale"` with `insert_ids`.
        """
        if mode not in get_args(PipelineMode):
            raise ValueError(
                f"PipelinedTrainStep's mode must be one of {get_args(PipelineMode)}, "
                f"got {mode!r}."
            )
        if insert_ids is not None and mode != "exact":
            raise ValueError(
                f"PipelinedTrainStep's insert_ids needs mode='exact', got {mode!r}: "
                "ids of the next batch would take rows that this batch still trains."
            )
        self._program = PipelineProgram(
            loss_fn=loss_fn,
            mode=mode,
            wrt=wrt,
            has_aux=has_aux,
            transform_gradients=transform_gradients,
            insert_ids=insert_ids,
        )
        self._compiler_options = compiler_options
        self._jitted: tuple[Any, Any] | None = None
        self._pending: _Pending | None = None

    def __call__(
        self, model: nnx.Module, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains on the batch of the call before, and begins this batch's lookup.

        Args:
          model: owns at least one `TPUEmbedding`. Model and optimizer are updated in
            place, and are the same ones until the next `drain`.
          optimizer: optimizer of the model.
          *args: the batch, as `loss_fn` takes it after the model.
          **kwargs: the same, by name.

        Returns:
          The loss of the batch of the call before, or `(loss, aux)`. None for the first
          call, and for the first one after `drain`.

        Raises:
          ValueError: if a feature depends on an activation or on a trained variable, or
            if the model or its tables are others than after the call before.
        """
        return self._run(model, optimizer, (args, kwargs))

    def drain(self, model: nnx.Module, optimizer: Optimizer) -> Any:
        """Trains on the batch of the last call, without a new one.

        Model and optimizer then are those of a plain loop over the same batches, in
        mode `"exact"`.

        Args:
          model: the model of the calls.
          optimizer: the optimizer of the calls.

        Returns:
          The loss of that batch, or `(loss, aux)`. None if no batch is pending.

        Raises:
          ValueError: if a call would raise it.
        """
        return None if self._pending is None else self._run(model, optimizer, None)

    def _run(
        self, model: nnx.Module, optimizer: Optimizer, next_batch: Batch | None
    ) -> Any:
        pending = self._pending
        if pending is not None:
            pending.check(model, optimizer)
        # The batch is read again in the next call, and loaders reuse their buffers.
        next_batch = jax.tree.map(_own_copy, next_batch)
        begin, advance = self._compile_lazily(model, optimizer)
        graph, state = nnx.split((model, optimizer))
        result = None
        if pending is None:
            state, in_flight = begin(graph, state, next_batch)
        else:
            state, in_flight, result = advance(
                graph, state, pending.in_flight, pending.batch, next_batch
            )
        if state is not None:
            nnx.update((model, optimizer), state)
        self._pending = None
        if next_batch is not None:
            batch = next_batch if in_flight.batch is None else None
            self._pending = _Pending(model, optimizer, batch, in_flight)
        return result

    def _compile_lazily(
        self, model: nnx.Module, optimizer: Optimizer
    ) -> tuple[Any, Any]:
        """Returns the jitted functions that begin the pipeline and advance it.

        The first call puts variables that lie on one device on the mesh.
        """
        state = nnx.state((model, optimizer))
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
            raise ValueError(
                "PipelinedTrainStep compiles the step itself, and got a model inside "
                "jit; call it outside of nnx.jit and jax.jit."
            )
        if self._jitted is None:
            layers = embedding_layers(model)
            if not layers:
                raise ValueError(
                    "The model has no TPUEmbedding layer; a PipelinedTrainStep has "
                    "nothing to look up ahead."
                )
            is_dynamic = any(
                s.is_dynamic for x in layers.values() for s in x.plan.stacks
            )
            if is_dynamic and self._program.insert_ids is None:
                raise ValueError(
                    "A PipelinedTrainStep for a model with a te.Dynamic vocabulary "
                    "needs insert_ids, which gives rows to the new ids of a batch. "
                    "Write te.PipelinedTrainStep(loss_fn, insert_ids=lambda model, "
                    "optimizer, ids, labels: (optimizer.insert_ids(model, ids), "
                    "labels)), with the arguments of your loss."
                )
            plan = next(iter(layers.values())).plan
            put_on_mesh(model, plan)
            put_on_mesh(optimizer, plan)
            options = self._compiler_options
            state = nnx.state((model, optimizer))
            self._jitted = self._program.jit(
                state, plan.compiler_options if options is None else dict(options)
            )
        return self._jitted


class _Pending:
    """The batch whose lookup has begun.

    Attributes:
      batch: the arguments of the loss; None if they are in flight.
      in_flight: what the program returned for it.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: Optimizer,
        batch: Batch | None,
        in_flight: InFlight,
    ):
        self.batch, self.in_flight = batch, in_flight
        self._owners = (model, optimizer)
        self._arrays = _arrays_to_check(model, optimizer)

    def check(self, model: nnx.Module, optimizer: Optimizer) -> None:
        """Refuses another model, or tables that something else has changed.

        An evaluation under `nnx.jit` returns the tables as other arrays of the same
        values. These are compared, bit by bit, on the devices.
        """
        if self._owners[0] is not model or self._owners[1] is not optimizer:
            raise ValueError(
                "PipelinedTrainStep has a batch in flight for another model or "
                "optimizer than it got; call drain with those first, or make one "
                "PipelinedTrainStep per model."
            )
        found = _arrays_to_check(model, optimizer)
        if len(found) != len(self._arrays) or not all(
            map(_has_same_bits, self._arrays, found)
        ):
            raise ValueError(
                "The tables must be those that PipelinedTrainStep left, got tables "
                "that something else has changed, such as Optimizer.update, "
                "set_embedding_tables or a restored checkpoint, or that a jitted "
                "function donated, while a batch is in flight. Call drain before such "
                "a change. To go on without that batch, make a new PipelinedTrainStep."
            )
        # The old tables are freed, if an evaluation has copied them.
        self._arrays = found


def _own_copy(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _arrays_to_check(model: nnx.Module, optimizer: Optimizer) -> list[jax.Array]:
    """Returns the tables, and the count of updates, which may leave tables as is."""
    tables = [layer.tables.get_value() for layer in embedding_layers(model).values()]
    return [*jax.tree.leaves(tables), optimizer.dense.step.get_value()]


def _has_same_bits(known: jax.Array, found: jax.Array) -> bool:
    if known is found:
        return True
    if (
        known.is_deleted()
        or found.aval != known.aval
        or not found.sharding.is_equivalent_to(known.sharding, known.ndim)
    ):
        return False
    return bool(_are_equal(known, found))


@jax.jit
def _are_equal(known: jax.Array, found: jax.Array) -> jax.Array:
    # A NaN equals itself here, and 0.0 differs from -0.0.
    bits = jnp.dtype(f"uint{8 * known.dtype.itemsize}")
    first, second = (jax.lax.bitcast_convert_type(x, bits) for x in (known, found))
    return jnp.array_equal(first, second)
