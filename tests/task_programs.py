"""Draws multi-task programs: tables that different steps look up, and their rules.

A program is run under several *layouts*. A layout says which tables share a stack or a
layer, where their rows lie, and which features a batch has. No number may depend on it.

Compiling takes much longer than running, so programs come in sets. The programs of a
set have the same tables, rules, tasks and layouts. They differ in the order of the
tasks, the ids and the derivatives.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embedding as te
from tests.lookup.placements import MESHES, mesh_of_shape, placements_on

rules = te.optimizers


def falling(count):
    """A schedule that differs in every step."""
    return 0.25 / (1 + count)


def rising(count):
    return 0.125 * count


def adagrad_of_row(gradient, row, slots, learning_rate, hyperparameters):
    accumulator = slots[0] + gradient**2
    step = learning_rate * gradient / jnp.sqrt(accumulator)
    return row - step - hyperparameters[0] * row, accumulator


RULES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: rules.sgd(rising),
    "momentum": lambda: rules.momentum(falling, use_nesterov=True),
    "adagrad": lambda: rules.adagrad(falling),
    "rowwise_adagrad": lambda: rules.rowwise_adagrad(falling, weight_decay=0.01),
    "adagrad_momentum": lambda: rules.adagrad_momentum(falling, momentum=0.5),
    "proximal_adagrad": lambda: rules.proximal_adagrad(falling, l1=0.01, l2=0.01),
    "adam": lambda: rules.adam(0.1, bias_correction=True),
    "adam, dense": lambda: rules.adam(falling, bias_correction=True, lazy_adam=False),
    "adam, decayed": lambda: rules.adam(
        falling,
        weight_decay_factor=0.1,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
    "ftrl": lambda: rules.ftrl(falling, l1_regularization_strength=0.01),
    "rmsprop": lambda: rules.rmsprop(falling, momentum=0.3, epsilon=1e-3),
    "adadelta": lambda: rules.adadelta(falling, epsilon=1e-3),
    "lion": lambda: rules.lion(falling),
    "adafactor": lambda: rules.adafactor(falling, epsilon_2=0.1),
    "adafactor, exact": lambda: rules.adafactor(0.3, epsilon_2=0.1, mode="exact"),
    "adafactor, averages": lambda: rules.adafactor(
        0.3, use_ema=True, ema_momentum=0.75, ema_start="initial_values"
    ),
    "adafactor, overwritten": lambda: rules.adafactor(
        0.3, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=3, mode="exact"
    ),
    "adafactor, decayed": lambda: rules.adafactor(
        0.3, weight_decay=0.1, clipnorm=2.0, mode="exact"
    ),
    "adafactor, collected": lambda: rules.adafactor(
        falling, use_ema=True, ema_momentum=0.75, gradient_accumulation_steps=3
    ),
    "adafactor, occurrences": lambda: rules.adafactor(
        falling, clipnorm=2.0, clipnorm_of="occurrences"
    ),
    "adafactor, norm": lambda: rules.adafactor(falling, global_clipnorm=2.0),
    "clippy_adagrad": lambda: rules.clippy_adagrad(
        falling, variable_relative_threshold=0.5, absolute_threshold=0.1
    ),
    "bounded_adagrad": lambda: rules.bounded_adagrad(falling, max_var_update=4.0),
    "frequency_aware_adagrad": lambda: rules.frequency_aware_adagrad(falling, l2=0.01),
    "frequency_estimator": lambda: rules.frequency_estimator(0.5, 100.0, 4.0),
    "proximal_yogi": lambda: rules.proximal_yogi(falling, l1=0.01),
    "online_yogi": lambda: rules.online_yogi(falling, l1=0.01),
    "lamb": lambda: rules.lamb(falling, weight_decay=0.01),
    "partial_rowwise_adam": lambda: rules.partial_rowwise_adam(
        falling, weight_decay=0.01
    ),
    "partial_rowwise_lamb": lambda: rules.partial_rowwise_lamb(falling),
    "rowwise_rmsprop": lambda: rules.rowwise_rmsprop(falling),
    "user_defined": lambda: rules.user_defined(
        adagrad_of_row,
        falling,
        slot_names=["accumulators"],
        slot_initializers=[0.1],
        hyperparameters=[falling],
    ),
    "in_sequence": lambda: rules.in_sequence(rules.adam(0.1, bias_correction=True)),
    "narrow slots": lambda: rules.with_slot_storage(optax.adam(0.1), "bfloat16"),
    "every_row, elementwise": lambda: rules.every_row(optax.sgd(0.1, momentum=0.9)),
    "every_row, by row": lambda: rules.every_row(rules.lamb(falling)),
    "every_row, collected": lambda: rules.every_row(
        optax.adamw(falling), gradient_steps=2
    ),
    "every_row, norm": lambda: rules.every_row(
        optax.chain(optax.clip_by_global_norm(2.0), optax.adam(0.1))
    ),
    "every_row, schedule-free": lambda: rules.every_row(
        optax.contrib.schedule_free_sgd(0.1)
    ),
    "optax.adam": lambda: optax.adam(0.1),
    "optax.adamw": lambda: optax.adamw(falling, weight_decay=0.1),
    "optax.amsgrad": lambda: optax.amsgrad(0.1),
    "optax.ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "optax.trace": lambda: optax.chain(
        optax.trace(0.9), optax.scale_by_schedule(lambda count: -falling(count))
    ),
    "optax.inject": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=falling, b1=lambda count: 0.9 - falling(count)
    ),
    "optax.norm": lambda: optax.chain(
        optax.clip_by_global_norm(2.0), optax.adam(falling)
    ),
    "optax.finite": lambda: optax.apply_if_finite(optax.adam(falling), 3),
}
DIMS = {"frequency_estimator": 1}
"""Dims of the rules that ask for one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomTable:
    """A table of a program.

    Attributes:
      name: of the table, and of its feature.
      size: rows.
      dim: columns.
      dtype: of its values.
      rule: key of `RULES`.
    """

    name: str
    size: int
    dim: int
    dtype: str
    rule: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a program.

    Attributes:
      ids: name of each table that the step looks up, to ids `[samples, valence]`.
      cotangents: the same, to derivatives `[samples, dim]`.
    """

    ids: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to lay out the tables of a program, without an effect on numbers.

    Attributes:
      mesh: name of a mesh.
      layers: names of the tables of each layer.
      placements: of each table, by name.
      are_stacked: True if tables with one rule share it; False if each has its own.
      has_all_features: False if a step uses a plan with its own features only.
      capacity: of `make_plan`.
    """

    mesh: str
    layers: list[list[str]]
    placements: dict[str, Any]
    are_stacked: bool
    has_all_features: bool
    capacity: int | None

    def plans(self, tables: list[RandomTable]) -> list[te.EmbeddingPlan]:
        """Returns the plan of each layer."""
        shared = {table.rule: RULES[table.rule]() for table in tables}
        features = {
            table.name: te.FeatureConfig(
                table=te.TableConfig(
                    vocabulary_size=table.size,
                    dim=table.dim,
                    combiner="sum",
                    name=table.name,
                    dtype=jnp.dtype(table.dtype),
                    initializer=jax.nn.initializers.zeros,
                    placement=self.placements[table.name],
                    optimizer=(
                        shared[table.rule] if self.are_stacked else RULES[table.rule]()
                    ),
                )
            )
            for table in tables
        }
        mesh = mesh_of_shape(self.mesh)
        return [
            te.make_plan(
                {name: features[name] for name in layer}, mesh, capacity=self.capacity
            )
            for layer in self.layers
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSet:
    """Tables, programs that look up some of them by turns, and layouts of the tables.

    Attributes:
      tables: of all programs.
      programs: the steps of each.
      layouts: of the tables.
    """

    tables: list[RandomTable]
    programs: list[list[Step]]
    layouts: list[Layout]

    def initial_values(self) -> dict[str, np.ndarray]:
        """Returns the first rows of each table, by name."""
        random = np.random.default_rng(len(self.tables))
        return {
            table.name: random.integers(-16, 17, (table.size, table.dim)) / 8
            for table in self.tables
        }


def draw_programs(seed: int, number: int, num_programs: int) -> ProgramSet:
    """Draws a set: all in one stack on one device first, then another layout."""
    random = np.random.default_rng([seed, number])
    tables = _draw_tables(random, number)
    names = [table.name for table in tables]
    tasks = [_draw_subset(random, names) for _ in range(2)]
    # A step may look up nothing at all, as one of another layer's task does.
    tasks += [[]] * (random.random() < 0.25)
    programs = []
    for _ in range(num_programs):
        order = random.integers(0, len(tasks), random.integers(4, 9))
        programs.append([_draw_step(random, tables, tasks[i]) for i in order])
    one_stack = Layout(
        mesh="1",
        layers=[names],
        placements=dict.fromkeys(names),
        are_stacked=True,
        has_all_features=True,
        capacity=None,
    )
    layouts = [one_stack, _draw_layout(random, names)]
    return ProgramSet(tables=tables, programs=programs, layouts=layouts)


def _draw_tables(random: np.random.Generator, number: int) -> list[RandomTable]:
    """Draws tables of one or two rules; sets take the rules by turns."""
    drawn = [list(RULES)[number % len(RULES)], str(random.choice(list(RULES)))]
    dim = int(random.choice([1, 2, 3, 8]))
    tables = []
    for i in range(random.integers(2, 5)):
        rule = drawn[int(i > 1 and random.random() < 0.5)]
        tables.append(
            RandomTable(
                name=f"t{i}",
                size=int(random.integers(1, 10)),
                dim=DIMS.get(rule, dim),
                dtype="bfloat16" if random.random() < 0.1 else "float32",
                rule=rule,
            )
        )
    return tables


def _draw_subset(random: np.random.Generator, names: list[str]) -> list[str]:
    chosen = [name for name in names if random.random() < 0.5]
    return chosen or [str(random.choice(names))]


def _draw_step(
    random: np.random.Generator, tables: list[RandomTable], task: list[str]
) -> Step:
    used = [table for table in tables if table.name in task]
    num_samples = 4
    return Step(
        ids={
            table.name: random.integers(0, table.size, (num_samples, 2), np.int32)
            for table in used
        },
        # Multiples of 1/8, whose sums are exact in any order.
        cotangents={
            table.name: random.integers(-16, 17, (num_samples, table.dim)) / 8
            for table in used
        },
    )


def _draw_layout(random: np.random.Generator, names: list[str]) -> Layout:
    # One device compiles fastest; most of what a layout may change does not need more.
    mesh = str(random.choice(["1", "1", *MESHES]))
    placements = [None, *placements_on(mesh).values()]
    layer_of = random.integers(0, random.integers(1, 4), len(names))
    layers = [
        [name for name, layer in zip(names, layer_of, strict=True) if layer == i]
        for i in range(3)
    ]
    return Layout(
        mesh=mesh,
        layers=[layer for layer in layers if layer],
        placements={
            name: placements[random.integers(len(placements))] for name in names
        },
        are_stacked=bool(random.random() < 0.25),
        has_all_features=bool(random.random() < 0.5),
        capacity=[None, 1, 2][random.integers(3)],
    )
