"""Train steps that look ahead, or set hyper-parameters before each step.

Between two calls to a `PipelinedTrainStep`, the next batch is in flight: its routed ids
in mode `"exact"`, or its rows in mode `"stale"`. Routed ids don't depend on tables, so
an early start doesn't change results in mode `"exact"`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from tpu_embedding import functional
from tpu_embedding.argument_checks import invalid
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.model_tables import features_by_layer
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import (
    checked_layers,
    embedding_layers,
    put_on_mesh,
    value_and_grad,
)
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import constrain_samples
from tpu_embedding.xla import read_before_write


def set_each_step(
    step: Callable[..., Any], **functions: Callable[[], Any]
) -> Callable[..., Any]:
    """Wraps a train step to set table hyper-parameters before each call.

    Use it for a callable learning rate such as `lambda: rate`, which TensorFlow calls
    on the host in each step. A JAX step is compiled, so the functions are called
    outside of it. Your table optimizer must hold the value in its state, with
    `optax.inject_hyperparams`. New values then take effect without recompilation.

    Args:
      step: compiled train step, or any function that runs one. Pass it a
        `tpu_embedding.Optimizer` or a `tpu_embedding.linen.TrainState`.
      **functions: hyper-parameter name to a function without arguments that returns
        the value. Each is called once per step, and must return equal values in all
        processes.

    Returns:
      A function with the same arguments and results as `step`. Do not compile it.

    Raises:
      TypeError: if one of `functions` is not a function without arguments. The returned
        step raises TypeError under `jit`, or if no argument holds table optimizers.
      ValueError: from the returned step, if no table optimizer has a hyper-parameter of
        that name.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> rule = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.0)
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> model = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = te.Optimizer(model, optax.adam(1e-3))
      >>> @nnx.jit
      ... def train_step(model, optimizer, ids):
      ...     loss, gradients = te.value_and_grad(lambda m: m(ids).sum())(model)
      ...     optimizer.update(model, gradients)
      ...     return loss
      >>> rates = iter([0.1, 0.05])
      >>> step = set_each_step(train_step, learning_rate=lambda: next(rates))
      >>> losses = [step(model, optimizer, model.prepare([1, 2])) for _ in range(2)]
    """
    for name, function in functions.items():
        _check_takes_nothing(name, function)

    # Without `updated=()`, the internals of a jitted step would be copied as well.
    @functools.wraps(step, updated=())
    def step_with_values(*args: Any, **kwargs: Any) -> Any:
        arguments = [*args, *kwargs.values()]
        if not any(map(_has_optimizers, arguments)):
            raise TypeError(
                "te.nn.set_each_step: the step must be called with a te.Optimizer or "
                "a te.linen.TrainState, which hold the hyper-parameters, got "
                f"{[type(x).__name__ for x in arguments]}."
            )
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
            raise TypeError(
                "te.nn.set_each_step: its step must be called outside of jit, which "
                f"would call {', '.join(functions)} only once, when it compiles. "
                "Compile only the inner step: "
                "te.nn.set_each_step(jitted_step, learning_rate=function)."
            )
        values = {name: function() for name, function in functions.items()}
        return step(
            *(_with_values(x, values) for x in args),
            **{key: _with_values(x, values) for key, x in kwargs.items()},
        )

    return step_with_values


def _with_values(argument: Any, values: dict[str, Any]) -> Any:
    """Sets the values in an argument that holds table optimizers."""
    if isinstance(argument, Optimizer):
        argument.set_hyperparameters(**values)
    elif _has_optimizers(argument):
        return argument.with_hyperparameters(**values)
    return argument


def _has_optimizers(argument: Any) -> bool:
    # A method identifies a TrainState, so that NNX programs don't import Linen.
    is_train_state = hasattr(type(argument), "with_hyperparameters")
    return isinstance(argument, Optimizer) or is_train_state


def _check_takes_nothing(name: str, function: Any) -> None:
    fix = "Set a number with optimizer.set_hyperparameters"
    if callable(function):
        try:
            inspect.signature(function).bind()
            return
        except ValueError:  # A builtin may have no signature.
            return
        except TypeError:
            fix = "Pass a schedule, a function of the step, to the optimizer"
    owner, rule = f"te.nn.set_each_step: {name}", "be a function without arguments"
    raise invalid(owner, rule, function, f"{fix}.", TypeError)


PipelineMode = Literal["exact", "stale"]
InFlight = dict[str, Any]
"""Maps layer paths to routed ids (mode `"exact"`) or to lookups (mode `"stale"`)."""


class PipelinedTrainStep:
    """A train step that also starts the lookup for the next batch.

    Each call trains on a batch and returns its loss. You choose what starts early:

    * `mode="exact"` deduplicates, routes and exchanges the next ids. Rows are read
      after the update, so after every call, model and optimizer are as in a plain loop.
    * `mode="stale"` also reads the rows, before the update. Activations are one update
      old, as with TensorFlow's `pipeline_execution_with_tensor_core`.

    Call it outside of `jit`: it compiles the step itself, and donates model and
    optimizer. If your batches have one shape, it compiles three programs: the first
    lookup, the calls before the last, and the last call. Each new shape compiles again.

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
        """Stores the functions; nothing is compiled before the first call.

        Args:
          loss_fn: `(model, batch) -> loss`, as for `tpu_embedding.value_and_grad`.
          features_of: maps a batch to the features that your loss first passes to the
            layer. If your model has several layers, it returns a dict from layer path
            to these features. Two kinds of lookup do not start early: a layer's second
            and later calls, and calls of layers that the dict leaves out.
          mode: what starts early, `"exact"` or `"stale"`.
          wrt: selects the dense parameters.
          has_aux: whether `loss_fn` returns a second value.
          transform_gradients: applied before the update, for example
            `lambda g: te.gradients.clip_by_global_norm(g, 1.0)`.

        Raises:
          ValueError: if the mode is unknown.
        """
        if mode not in get_args(PipelineMode):
            rule = f"be one of {get_args(PipelineMode)}"
            raise invalid("te.PipelinedTrainStep: mode", rule, mode)
        self._features_of = features_of
        self._mode = mode
        self._compute = value_and_grad(loss_fn, wrt=wrt, has_aux=has_aux)
        self._transform_gradients = transform_gradients
        self._jitted: dict[Any, tuple[Any, Any]] = {}
        self._pending: _Pending | None = None

    def __call__(
        self, model: nnx.Module, optimizer: Optimizer, batch: Any, next_batch: Any
    ) -> Any:
        """Trains on a batch and starts the lookup for the next one.

        Args:
          model: owns at least one `TPUEmbedding`. Model and optimizer are updated in
            place.
          optimizer: made for this model.
          batch: batch to train on. If you passed a `next_batch` in the previous call,
            pass the same object. Two batches are alive at a time, so copy them if your
            loader reuses its buffers.
          next_batch: batch for the next call. Pass None with the last batch, and before
            anything else changes the model.

        Returns:
          The loss of `batch` before the update, or `(loss, aux)`.

        Raises:
          ValueError: if `batch` is not the `next_batch` of the previous call. In the
            first call, also raised if the loss calls a layer with features that differ
            from the result of `features_of`. In mode `"stale"`, also raised if
            `optimizer` is a different object or has changed since the previous call.
            However, a change to table values goes unnoticed: the batch in flight keeps
            the old rows.
        """
        begin, advance = self._compile_lazily(model, optimizer)
        graph, state = nnx.split((model, optimizer))
        if self._pending is None:
            own_batch = jax.tree.map(_own_copy, batch)
            # The features are compared only when a pipeline starts. In later calls,
            # reading the result would wait for devices.
            in_flight, agreements = begin(graph, state, own_batch)
            for path, agrees in agreements.items():
                if not agrees:
                    raise ValueError(
                        "PipelinedTrainStep's features_of must return the features of "
                        f"the first call of layer {path!r}, but the loss calls it with "
                        "different features or not at all. Include weights: "
                        "te.DenseIds(ids=..., weights=...). Features that depend on "
                        "activations, parameters or random numbers can't be looked up "
                        "ahead: use te.value_and_grad for such a model."
                    )
        else:
            self._check_pending(self._pending, optimizer, batch)
            _, own_batch, in_flight, _ = self._pending
        own_next_batch = jax.tree.map(_own_copy, next_batch)
        state, next_in_flight, result = advance(
            graph, state, in_flight, own_batch, own_next_batch
        )
        nnx.update((model, optimizer), state)
        self._pending = None
        if next_batch is not None:
            num_steps = optimizer.dense.step.get_value()
            self._pending = _Pending(
                next_batch, own_next_batch, next_in_flight, num_steps
            )
        return result

    def _check_pending(
        self, pending: "_Pending", optimizer: Optimizer, batch: Any
    ) -> None:
        if pending.announced is not batch:
            raise ValueError(
                "PipelinedTrainStep must be called with the next_batch of the previous "
                "call, got a different object. Keep one object per batch:"
                "\n  for batch, next_batch in itertools.pairwise([*batches, None]):\n"
                "      loss = step(model, optimizer, batch, next_batch)\n"
                "To drop the announced batch, make a new PipelinedTrainStep."
            )
        # Each update makes a new array, so comparing identity detects updates without
        # reading a count.
        is_same = optimizer.dense.step.get_value() is pending.num_steps
        if self._mode == "stale" and not is_same:
            raise ValueError(
                "PipelinedTrainStep with mode='stale' has rows in flight for another "
                "optimizer, or something else has changed the optimizer since, such as "
                "Optimizer.update or a restored checkpoint. Pass next_batch=None "
                "before such a change. To drop the batch in flight, make a "
                "new PipelinedTrainStep."
            )

    def _compile_lazily(
        self, model: nnx.Module, optimizer: Optimizer
    ) -> tuple[Any, Any]:
        """Jits the functions that begin and advance the pipeline, once per model."""
        leaves, structure = jax.tree.flatten(nnx.state((model, optimizer)))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise ValueError(
                "PipelinedTrainStep compiles the step itself, but got a model inside "
                "jit; call it outside of nnx.jit and jax.jit."
            )
        if structure in self._jitted:
            return self._jitted[structure]
        line = "step(model, optimizer, batch, next_batch)"
        layers = checked_layers("te.PipelinedTrainStep", model, line)
        plans = [layer.plan for layer in layers.values()]
        for vocabulary in (x.vocabulary for plan in plans for x in plan.stacks):
            if not vocabulary.ids_are_rows:
                raise NotImplementedError(
                    "A PipelinedTrainStep needs tables whose ids are row numbers, "
                    f"got the vocabulary {vocabulary!r}. "
                    f"{vocabulary.instead_of_row_numbers}"
                )
        plan = plans[0]  # All layers of a model have one mesh and one hardware.
        for module in (model, optimizer):
            put_on_mesh(module, plan)
        jit = functools.partial(
            jax.jit, static_argnums=0, compiler_options=plan.compiler_options
        )
        # The first call gets and returns these shardings, so the second call doesn't
        # recompile.
        state = nnx.state((model, optimizer))
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), state)
        advance = jit(
            self._advance,
            donate_argnums=1,
            out_shardings=(shardings, None, None),
        )
        self._jitted[structure] = jit(self._begin), advance
        return self._jitted[structure]

    def _begin(
        self, graph: nnx.GraphDef, state: nnx.State, batch: Any
    ) -> tuple[InFlight, dict[str, Any]]:
        """Starts the lookup for a batch, and checks `features_of` for each layer."""
        model, _ = nnx.merge(graph, state)
        routed = self._route(model, batch)
        lookups = _read(model, routed)
        # Only the comparison of features is used. XLA removes the rest of the loss,
        # except prints.
        self._compute_with(model, batch, lookups)
        agreements = _take_agreements(model)
        in_flight = routed if self._mode == "exact" else lookups
        return in_flight, {path: agreements[path] for path in routed}

    def _advance(
        self,
        graph: nnx.GraphDef,
        state: nnx.State,
        in_flight: InFlight,
        batch: Any,
        next_batch: Any,
    ) -> tuple[nnx.State, InFlight, Any]:
        """Trains on `batch`, and starts the lookup of `next_batch`, in one program."""
        model, optimizer = nnx.merge(graph, state)
        begun = {} if next_batch is None else self._route(model, next_batch)
        if self._mode == "exact":
            in_flight = _read(model, in_flight)
        else:
            # The update waits for this read. Otherwise XLA may write rows before it
            # reads them, and copy the whole table to keep the old values.
            layers = embedding_layers(model)
            tables = {path: layers[path].tables.get_value() for path in begun}
            tables, begun = read_before_write((tables, _read(model, begun)))
            for path, stacks in tables.items():
                layers[path].tables.set_value(stacks)
        result, gradients = self._compute_with(model, batch, in_flight)
        _take_agreements(model)  # Unused here, but the layers must forget them.
        if self._transform_gradients is not None:
            gradients = self._transform_gradients(gradients)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), begun, result

    def _compute_with(self, model: nnx.Module, batch: Any, lookups: InFlight) -> Any:
        layers = embedding_layers(model)
        for path, features in self._features(model, batch).items():
            layers[path].prefetched.set_value((features, lookups[path]))
        return self._compute(model, batch)

    def _features(self, model: nnx.Module, batch: Any) -> dict[str, Any]:
        features, layers = self._features_of(batch), embedding_layers(model)
        return features_by_layer(features, layers, "PipelinedTrainStep")

    def _route(self, model: nnx.Module, batch: Any) -> InFlight:
        """Sends batch ids to the devices that own their rows."""
        plans = {path: layer.plan for path, layer in embedding_layers(model).items()}
        return {
            path: _by_sample(functional.route(features, plans[path]), plans[path])
            for path, features in self._features(model, batch).items()
        }


class _Pending(NamedTuple):
    """The batch whose lookup has begun."""

    announced: Any
    """The batch as the user passed it, compared by identity."""
    batch: Any
    """The batch for the loss, in which host arrays are copies."""
    in_flight: InFlight
    num_steps: jax.Array
    """The step count of the optimizer, compared by identity."""


def _own_copy(leaf: Any) -> Any:
    # The next call reads the array again, and the user may change it until then.
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _take_agreements(model: nnx.Module) -> dict[str, Any]:
    """Collects each layer's `features_agree`, and clears it."""
    agreements = {}
    for path, layer in embedding_layers(model).items():
        # Empty if the loss has not called the layer.
        (agreements[path],) = layer.features_agree.get_value() or (False,)
        layer.features_agree.set_value(())
    return agreements


def _read(model: nnx.Module, routed: InFlight) -> InFlight:
    """Reads the rows for routed ids from the model."""
    layers = {path: embedding_layers(model)[path] for path in routed}
    return {
        path: _by_sample(
            functional.read_rows(layer.tables.get_value(), routed[path], layer.plan),
            layer.plan,
        )
        for path, layer in layers.items()
    }


def _by_sample(tree: Any, plan: EmbeddingPlan) -> Any:
    """Keeps sample arrays on their devices between two programs."""
    return jax.tree.map(lambda leaf: constrain_samples(leaf, plan), tree)
