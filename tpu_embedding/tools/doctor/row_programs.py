"""The program of a case: the public path from ids to new tables.

Results and times come from one compiled program, so the program that is checked is also
the one that is timed.
"""

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embedding.combiners import Combiner
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.functional.steps import apply_gradients, compute_gradients, lookup
from tpu_embedding.hardware import INTERPRETED_HARDWARE, hardware_of_device
from tpu_embedding.initializers import constant
from tpu_embedding.kernel_verdicts import (
    MIN_SPEED_RATIO,
    KernelVerdicts,
    Verdict,
    capability_of,
)
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.doctor.dense_reference import RULES
from tpu_embedding.tools.doctor.row_cases import RowCase

VALENCE: Final = 4
"""Ids of a sample of more than one id; of a ragged one, the mean."""

_FLOATS_ON_TPU: Final = 9 * 2**18
"""Elements of the rows that a feature looks up: several chunks of 64 KiB for each of 64
subcores. The factor 9 gives some of them more chunks than others."""

_FLOATS_ELSEWHERE: Final = 9 * 2**11

_MANY_ROWS_ON_TPU: Final = 2**24 + 2**20
"""float32 cannot tell the row ids above 2**24 from their neighbours."""

_MANY_ROWS_ELSEWHERE: Final = 2**17 + 2**13

_LANES: Final = 128
_ALIGNED_SAMPLES: Final = 8
"""Kernels take samples in multiples of this times the rows of a line."""

_ROUNDS: Final = 4
"""Rounds of a case that needs several, if its ids were all different."""

_FAST_COMPILATION: Final = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""XLA's options for a CPU. There a program compiles for longer than it runs."""


class CaseSize(NamedTuple):
    """The sizes of a case.

    Attributes:
      num_samples: samples of the batch.
      table_sizes: rows of each table; the name of a table is its combiner.
    """

    num_samples: int
    table_sizes: dict[Combiner, int]


def size_of(case: RowCase, *, on_tpu: bool, num_devices: int) -> CaseSize:
    """Returns the sizes of a case.

    Args:
      case: the case.
      on_tpu: True on a TPU. Elsewhere the kernels are interpreted, which is slow.
      num_devices: devices of the program; each gets as many samples as kernels ask for.
    """
    ids_per_sample = 1 if case.ids == "one id" else VALENCE
    multiple = num_devices * _ALIGNED_SAMPLES * max(1, _LANES // case.dim)
    floats = _FLOATS_ON_TPU if on_tpu else _FLOATS_ELSEWHERE
    num_samples = floats // (case.dim * ids_per_sample)
    num_samples = max(1, round(num_samples / multiple)) * multiple
    num_rows = 4 * num_samples * ids_per_sample
    if case.has_many_rows:
        num_rows = max(num_rows, _MANY_ROWS_ON_TPU if on_tpu else _MANY_ROWS_ELSEWHERE)
    num_rows += 5  # The second table, behind these rows, does not start at a line.
    return CaseSize(num_samples, {"sum": num_rows, "mean": num_rows // 8 + 3})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProgram:
    """A case on some devices.

    Attributes:
      case: the case.
      size: sizes of its tables and its batch.
      plan: plan of its tables.
    """

    case: RowCase
    size: CaseSize
    plan: EmbeddingPlan

    @functools.cached_property
    def step(self) -> Callable[..., Any]:
        """The jitted program; takes tables, slots, features and cotangents.

        It returns activations, rounds per stack, and the new tables and slots, which
        are None without a rule. With a rule it donates tables and slots.
        """
        on_cpu = self.plan.mesh.devices.flat[0].platform == "cpu"
        options = _FAST_COMPILATION if on_cpu else dict(self.plan.compiler_options)
        donated = () if self.case.rule is None else (0, 1)
        return jax.jit(self._run, donate_argnums=donated, compiler_options=options)

    def _run(self, tables: Any, slots: Any, features: Any, cotangents: Any) -> Any:
        result = lookup(tables, features, self.plan)
        looked_up = (result.activations, result.stats.rounds)
        if self.case.rule is None:
            return *looked_up, None, None
        gradients = compute_gradients(result.routing, cotangents, self.plan)
        return *looked_up, *apply_gradients(tables, slots, gradients, self.plan)


def row_program(case: RowCase, backend: Any, devices: Sequence[Any]) -> RowProgram:
    """Makes the program of a case.

    Args:
      case: the case.
      backend: runs the case's directions; XLA runs the others.
      devices: devices of one kind. A case without an exchange uses the first.
    """
    if case.exchange is None:
        devices = devices[:1]
    hardware = hardware_of_device(devices[0])
    size = size_of(case, on_tpu=hardware.is_tpu, num_devices=len(devices))
    features = {
        name: FeatureConfig(
            table=TableConfig(
                vocabulary_size=num_rows,
                dim=case.dim,
                combiner=name,
                initializer=constant(0.0),
                name=name,
            )
        )
        for name, num_rows in size.table_sizes.items()
    }
    kernels = None
    if backend != "xla":
        kernels = _allowing(case, backend)
        if not hardware.is_tpu:
            hardware = INTERPRETED_HARDWARE
    capacity = None
    if case.needs_rounds:
        capacity = math.ceil(size.num_samples * VALENCE / len(devices) / _ROUNDS)
    plan = make_plan(
        features,
        Mesh(np.asarray(devices), ("shard",)),
        optimizer=None if case.rule is None else RULES[case.rule].optimizer,
        kernels=kernels,
        hardware=hardware,
        exchange=case.exchange,
        capacity=capacity,
    )
    return RowProgram(case=case, size=size, plan=plan)


def _allowing(case: RowCase, backend: Any) -> KernelVerdicts:
    """Returns verdicts that allow the case's directions, and no others."""
    kind = "elements" if case.rule is None else RULES[case.rule].kind
    verdicts = tuple(
        Verdict(
            **capability_of(direction, case.dim, kind)._asdict(),
            problem=None,
            speed_ratio=MIN_SPEED_RATIO,
            date=datetime.date.today().isoformat(),
        )
        for direction in case.directions
    )
    return KernelVerdicts(
        backend=backend, verdicts=verdicts, absence="not part of this case"
    )
