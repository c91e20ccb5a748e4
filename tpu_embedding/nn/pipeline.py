"""A train step that starts the lookup of the next batch while it computes this one.

One compiled program trains on a batch and begins the lookup of the batch after it.

* `mode="exact"` moves the ids of the next batch early: flatten, dedup, route, and the
  exchange of ids. It reads rows after the update. Numbers equal those of a plain loop.
* `mode="stale"` also reads the rows early, before the update. Activations are one
  update old, as with TensorFlow's `pipeline_execution_with_tensor_core`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.pipeline_program import InFlight, PipelineMode, PipelineProgram
from tpu_embedding.nn.training import embedding_layers, put_on_mesh


class PipelinedTrainStep:
    """A train step that begins the lookup of the next batch.

    Each call trains on a batch, returns the loss of that batch, and begins the lookup
    of the batch after it. In mode `"exact"`, model and optimizer are those of a plain
    loop after every call.

    Call it outside of `jit`: it compiles the step itself, and donates model and
    optimizer. A steady stream of batches compiles three programs: one that begins the
    first batch, one for all calls but the last, and one for the last. A batch of
    another shape compiles again.

    Example:
      >>> import itertools, optax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> model = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = te.Optimizer(model, optax.sgd(0.1))
      >>> step = PipelinedTrainStep(
      ...     lambda model, batch: jnp.sum(model(batch["ids"]) ** 2),
      ...     features_of=lambda batch: batch["ids"],
      ... )
      >>> batches = [{"ids": jnp.array(ids)} for ids in ([1, 2], [2, 3])]
      >>> losses = [
      ...     step(model, optimizer, batch, next_batch)
      ...     for batch, next_batch in itertools.pairwise([*batches, None])
      ... ]
      >>> len(losses)
      2
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        *,
        features_of: Callable[[Any], Any],
        mode: PipelineMode = "exact",
        wrt: nnx.filterlib.Filter = nnx.Param,
        has_aux: bool = False,
        transform_gradients: Callable[[Gradients], Gradients] | None = None,
    ):
        """Keeps the functions; nothing is compiled before the first call.

        Args:
          loss_fn: `(model, batch) -> loss`, as for `tpu_embedding.value_and_grad`.
          features_of: function from a batch to the features of the first call of the
            layer in the loss. For a model with several layers, to a dict of these
            features by the path of the layer. Further calls, and layers that it leaves
            out, are looked up in the step itself.
          mode: `"exact"` for the numbers of a plain loop, `"stale"` to read rows before
            the update of the batch before.
          wrt: filter of the dense parameters.
          has_aux: True if `loss_fn` returns a second value.
          transform_gradients: applied before the update, such as
            `lambda g: te.gradients.clip_by_global_norm(g, 1.0)`; None: nothing.

        Raises:
          ValueError: if the mode is unknown.
        """
        if mode not in get_args(PipelineMode):
            raise ValueError(
                f"PipelinedTrainStep's mode must be one of {get_args(PipelineMode)}, "
                f"got {mode!r}."
            )
        self._program = PipelineProgram(
            loss_fn=loss_fn,
            features_of=features_of,
            mode=mode,
            wrt=wrt,
            has_aux=has_aux,
            transform_gradients=transform_gradients,
        )
        self._jitted: tuple[Any, Any] | None = None
        self._structure: Any = None
        self._pending: _Pending | None = None

    def __call__(
        self, model: nnx.Module, optimizer: Optimizer, batch: Any, next_batch: Any
    ) -> Any:
        """Trains on a batch, and begins the lookup of the next one.

        Args:
          model: owns at least one `TPUEmbedding`. Model and optimizer are updated in
            place.
          optimizer: optimizer of the model.
          batch: to train on. It is the `next_batch` of the call before, the same
            object, unless that was None or there was none. A loader that reuses its
            buffers must copy them: two batches are alive at a time.
          next_batch: the batch of the next call. None finishes: after the last batch,
            and before something else changes the model. In mode `"stale"`, the rows
            of `next_batch` are those of the tables in this call.

        Returns:
          The loss of `batch` before the update, or `(loss, aux)`.

        Raises:
          ValueError: if `batch` is another one than the call before announced; if the
            loss gives other features to a layer than `features_of` returns, which the
            first call checks; or if a batch is in flight for another model, or, in mode
            `"stale"`, if something else has changed the optimizer since. Tables that
            were set since are not noticed: the batch in flight has the old rows.
        """
        begin, advance = self._compile_lazily(model, optimizer)
        if self._pending is None:
            own = jax.tree.map(_own_copy, batch)
            graph, state = nnx.split((model, optimizer))
            self._check_features(graph, state, own)
            in_flight = begin(graph, state, own)
        else:
            self._check_pending(self._pending, model, optimizer, batch)
            _, own, in_flight, _ = self._pending
        own_next = jax.tree.map(_own_copy, next_batch)
        graph, state = nnx.split((model, optimizer))
        state, next_in_flight, result = advance(graph, state, in_flight, own, own_next)
        nnx.update((model, optimizer), state)
        self._pending = None
        if next_batch is not None:
            owners = (model, optimizer, optimizer.dense.step.get_value())
            self._pending = _Pending(next_batch, own_next, next_in_flight, owners)
        return result

    def _check_features(self, graph: Any, state: Any, batch: Any) -> None:
        """Refuses a loss that gives other features to a layer than `features_of`."""
        check = jax.jit(self._program.features_agree, static_argnums=0)
        for path, agree in check(graph, state, batch).items():
            if not agree:
                raise ValueError(
                    "PipelinedTrainStep's features_of must return the features with "
                    f"which the loss calls the layer {path!r}, got others, or the loss "
                    "does not call it. Weights belong to the features: te.DenseIds("
                    "ids=..., weights=...). Features that depend on activations, on "
                    "parameters or on random numbers are not there when the next "
                    "lookup begins: use te.value_and_grad for such a model."
                )

    def _check_pending(
        self, pending: "_Pending", model: nnx.Module, optimizer: Optimizer, batch: Any
    ) -> None:
        """Refuses another batch or model than the call before announced."""
        if pending.announced is not batch:
            raise ValueError(
                "PipelinedTrainStep must be called with the batch that the call before "
                "got as next_batch, got another one. Keep one object per batch:\n"
                "  for batch, next_batch in itertools.pairwise([*batches, None]):\n"
                "      loss = step(model, optimizer, batch, next_batch)\n"
                "To drop the announced batch, make a new PipelinedTrainStep."
            )
        of_model, of_optimizer, num_steps = pending.owners
        if of_model is not model or of_optimizer is not optimizer:
            raise ValueError(
                "PipelinedTrainStep has a batch in flight for another model or "
                "optimizer than it got. Finish with those first, by next_batch=None, "
                "or make one PipelinedTrainStep per model."
            )
        is_same = optimizer.dense.step.get_value() is num_steps
        if self._program.mode == "stale" and not is_same:
            raise ValueError(
                "PipelinedTrainStep with mode='stale' has rows in flight, and "
                "something else has changed the optimizer since, such as "
                "Optimizer.update or a restored checkpoint. Give next_batch=None "
                "before such a change. To go on without the batch in flight, make a "
                "new PipelinedTrainStep."
            )

    def _compile_lazily(
        self, model: nnx.Module, optimizer: Optimizer
    ) -> tuple[Any, Any]:
        """Returns the jitted functions that begin the pipeline and advance it.

        The first call puts variables that lie on one device on the mesh.
        """
        leaves, structure = jax.tree.flatten(nnx.state((model, optimizer)))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise ValueError(
                "PipelinedTrainStep compiles the step itself, and got a model inside "
                "jit; call it outside of nnx.jit and jax.jit."
            )
        if self._jitted is not None:
            if structure != self._structure:
                raise ValueError(
                    "PipelinedTrainStep has compiled its step for a model and an "
                    "optimizer with other variables. Make a new PipelinedTrainStep."
                )
            return self._jitted
        plans = [layer.plan for layer in embedding_layers(model).values()]
        if not plans:
            raise ValueError(
                "The model has no TPUEmbedding layer; a PipelinedTrainStep has nothing "
                "to look up ahead."
            )
        if any(stack.is_dynamic for plan in plans for stack in plan.stacks):
            raise NotImplementedError(
                "A PipelinedTrainStep takes no model with a te.Dynamic vocabulary, "
                "whose new ids get rows in the step that looks them up. Write a plain "
                "step with optimizer.insert_ids and te.value_and_grad."
            )
        for module in (model, optimizer):
            put_on_mesh(module, plans[0])
        options = plans[0].compiler_options
        jit = functools.partial(jax.jit, static_argnums=0, compiler_options=options)
        # The new state keeps the shardings, so that the second call compiles nothing.
        state = nnx.state((model, optimizer))
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), state)
        advance = jit(
            self._program.advance,
            donate_argnums=1,
            out_shardings=(shardings, None, None),
        )
        self._structure = structure
        self._jitted = jit(self._program.begin), advance
        return self._jitted


class _Pending(NamedTuple):
    """The batch whose lookup has begun.

    Attributes:
      announced: the batch, as the user gave it.
      batch: for the loss, with copies of host memory.
      in_flight: what the program returned for it.
      owners: model, optimizer, and its count of steps.
    """

    announced: Any
    batch: Any
    in_flight: InFlight
    owners: tuple[nnx.Module, Optimizer, jax.Array]


def _own_copy(leaf: Any) -> Any:
    # The next call reads the batch again; its array may change until then.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
