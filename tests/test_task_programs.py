"""Random multi-task programs give the same tables under every layout.

The quick tier runs a few programs, the exhaustive tier more. Any number runs outside
pytest: `python -m tests.many_task_programs --programs 500 --seed 1`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.task_programs import RULES, draw_programs
from tpu_embedding.gradients import TableGradients
from tpu_embedding.optimizers.final_dense_values import has_averages
from tpu_embedding.optimizers.names import optimizer_by_name

# Sums of gradients are exact, but XLA fuses the arithmetic of a rule differently for
# each layout. Moments divide by roots, and up to eight steps add their roundings up.
TOLERANCE = 2e-5
# A value that lies on the border of two bfloat16 may be rounded to either.
BFLOAT16_TOLERANCE = 2 * float(jnp.finfo(jnp.bfloat16).eps)


class Run:
    """The layers of a set of programs in one layout, and their state."""

    def __init__(self, programs, layout):
        self.layout = layout
        self.plans = layout.plans(programs.tables)
        self._initial_values = programs.initial_values()
        self._step = jax.jit(self._trace)

    def start(self):
        self.tables = [
            tables_with_values(plan, self._initial_values) for plan in self.plans
        ]
        self.slots = [
            te.functional.init_slots(tables, plan)
            for tables, plan in zip(self.tables, self.plans, strict=True)
        ]

    def take(self, step):
        cotangents = jax.tree.map(np.float32, step.cotangents)
        self.tables, self.slots = self._step(
            self.tables, self.slots, step.ids, cotangents
        )
        # Emulated devices wait for each other for ever if several steps, with sums over
        # some axes of a mesh, are in flight at once.
        jax.block_until_ready((self.tables, self.slots))

    def _trace(self, tables, slots, ids, cotangents):
        gradients = [
            self._gradients(*each, ids, cotangents)
            for each in zip(tables, self.plans, strict=True)
        ]
        norm = te.gradients.global_norm(gradients)
        results = [
            te.functional.apply_gradients(*each, norm)
            for each in zip(tables, slots, gradients, self.plans, strict=True)
        ]
        return [result[0] for result in results], [result[1] for result in results]

    def _gradients(self, tables, plan, ids, cotangents):
        """Returns a layer's gradients; none if the step does not call the layer."""
        names = [feature.name for feature in plan.features if feature.name in ids]
        if not names:
            return TableGradients({}, plan)
        used = plan
        if not self.layout.has_all_features:
            configs = {f.name: f.config for f in plan.features if f.name in names}
            used = plan.with_features(configs)
        result = te.functional.lookup(tables, {name: ids[name] for name in names}, used)
        derivatives = {name: cotangents[name] for name in names}
        return te.functional.compute_gradients(result.routing, derivatives, plan)

    def finalize(self):
        """Sets the tables to their averages, in layers that keep some."""
        for i, plan in enumerate(self.plans):
            if has_averages(self.slots[i]):
                self.tables[i], self.slots[i] = te.functional.finalize_variable_values(
                    self.tables[i], self.slots[i], plan
                )

    def values(self):
        """Returns all that the layers know of each table, by table and name."""
        found = {}
        for tables, slots, plan in zip(
            self.tables, self.slots, self.plans, strict=True
        ):
            of_tables = te.functional.unstack_tables(tables, plan)
            for name, state in te.functional.slot_values(slots, plan, "all").items():
                found[name] = {"values": of_tables[name]} | state
        return found


def tables_with_values(plan, values):
    """Returns tables of given values, without a program that draws initial ones."""
    shapes = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    shardings = {stack.name: plan.rows_sharding(stack) for stack in plan.stacks}
    zeros = {
        name: jax.tree.map(
            lambda s, name=name: jax.device_put(
                np.zeros(s.shape, s.dtype), shardings[name]
            ),
            packed,
        )
        for name, packed in shapes.items()
    }
    own = {table.name for stack in plan.stacks for table in stack.tables}
    return te.functional.with_table_values(
        zeros, {name: values[name] for name in own}, plan
    )


def check_programs(programs):
    """Runs programs under each layout, and compares all values of all tables.

    Returns:
      The largest difference of a float32 value, in proportion to one plus its size.
    """
    first, *others = [Run(programs, layout) for layout in programs.layouts]
    largest = 0.0
    for steps in programs.programs:
        expected = values_after(first, steps)
        for other in others:
            found = values_after(other, steps)
            for table in programs.tables:
                difference = check_table(
                    table, found[table.name], expected[table.name], other.layout
                )
                largest = max(largest, difference)
    return largest


def check_table(table, found, expected, layout):
    assert found.keys() == expected.keys()
    largest = 0.0
    is_narrow = table.dtype != "float32" or table.rule == "narrow slots"
    bound = BFLOAT16_TOLERANCE if is_narrow else TOLERANCE
    for part, value in expected.items():
        difference = difference_of(found[part], value)
        if not difference <= bound:
            raise AssertionError(
                f"{part} of {table} differ by {difference}:\n{value}\n"
                f"{found[part]}\nin {layout}"
            )
        largest = max(largest, difference)
    return 0.0 if is_narrow else largest


def values_after(run, steps):
    """Returns all values of all tables after some steps, and after finalization."""
    run.start()
    for step in steps:
        run.take(step)
    values = run.values()
    run.finalize()
    for name, of_table in run.values().items():
        values[name] |= {f"final {part}": value for part, value in of_table.items()}
    return values


def difference_of(found, expected):
    """Returns the largest difference, in proportion to one plus the value."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    assert np.isfinite(expected).all()
    if not found.size:
        return 0.0
    return float(np.max(np.abs(found - expected) / (1 + np.abs(expected))))


@pytest.mark.parametrize(
    "number",
    [
        2,
        *[pytest.param(n, marks=pytest.mark.full) for n in (0, 1, *range(3, 8))],
        *[pytest.param(n, marks=pytest.mark.exhaustive) for n in range(8, len(RULES))],
    ],
)
def test_no_number_depends_on_the_layout(number):
    check_programs(draw_programs(0, number, 2))


def test_programs_draw_all_optimizers_of_the_package():
    with pytest.raises(ValueError, match="must be one of") as error:
        optimizer_by_name("")
    names = str(error.value).partition("[")[2].partition("]")[0]
    for name in names.split(", "):
        assert name.strip("'") in RULES
