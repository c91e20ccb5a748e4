"""The compiled program of a case: the public path from ids to new tables.

Correctness, speed and the test that compiles ahead of time share it, so that the
program that is checked is also the one that is timed.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.functional.steps import apply_gradients, compute_gradients, lookup
from tpu_embedding.hardware import INTERPRETED_HARDWARE, hardware_of_device
from tpu_embedding.kernel_verdicts import (
    MIN_SPEED_RATIO,
    KernelVerdicts,
    RuleKind,
    Verdict,
    capability_name,
)
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.kernels.kernel_access import Backend
from tpu_embedding.tools.doctor.dense_reference import RULES
from tpu_embedding.tools.doctor.row_batches import VALENCE, CaseSize
from tpu_embedding.tools.doctor.row_cases import RowCase

_FAST_COMPILATION: Final = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""XLA's options for a CPU. There a program compiles for longer than it runs."""

_ROUNDS: Final = 4
"""Rounds of a case with one owner, if its ids were all different."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowProgram:
    """A case on some devices.

    Attributes:
      case: the case.
      size: of its tables and batch.
      plan: of its tables.
    """

    case: RowCase
    size: CaseSize
    plan: EmbeddingPlan

    @property
    def step(self) -> Callable[..., Any]:
        """The program; takes tables, slots, features and cotangents.

        It returns activations, rounds per stack, and the new tables and slots, which
        are None without a rule. With a rule it donates tables and slots.
        """
        return jax.jit(
            self._run,
            donate_argnums=() if self.case.rule is None else (0, 1),
            compiler_options=self._compiler_options,
        )

    def _run(self, tables: Any, slots: Any, features: Any, cotangents: Any) -> Any:
        result = lookup(tables, features, self.plan)
        looked_up = (result.activations, result.stats.rounds)
        if self.case.rule is None:
            return *looked_up, None, None
        gradients = compute_gradients(result.routing, cotangents, self.plan)
        return *looked_up, *apply_gradients(tables, slots, gradients, self.plan)

    @property
    def _compiler_options(self) -> dict[str, Any]:
        platform = self.plan.mesh.devices.flat[0].platform
        if platform == "tpu":
            return dict(self.plan.compiler_options)
        return _FAST_COMPILATION if platform == "cpu" else {}


def row_program(
    case: RowCase, size: CaseSize, backend: Backend, devices: Sequence[Any]
) -> RowProgram:
    """Makes the program of a case.

    Args:
      case: the case.
      size: of its tables and batch.
      backend: runs the case's directions; XLA runs the others.
      devices: to run on, of one kind.
    """
    mesh = Mesh(np.asarray(devices), ("shard",))
    features = {
        name: FeatureConfig(
            table=TableConfig(
                vocabulary_size=num_rows, dim=case.dim, combiner=name, name=name
            )
        )
        for name, num_rows in size.table_sizes.items()
    }
    hardware = hardware_of_device(devices[0])
    kernels = None
    if backend != "xla":
        kernels = _verdicts(case, backend)
        if not hardware.is_tpu:
            hardware = INTERPRETED_HARDWARE
    capacity = None
    if case.owner == "one":
        num_ids = size.num_samples * VALENCE
        capacity = math.ceil(num_ids / len(devices) / _ROUNDS)
    plan = make_plan(
        features,
        mesh,
        optimizer=None if case.rule is None else RULES[case.rule].optimizer,
        kernels=kernels,
        hardware=hardware,
        exchange=case.exchange,
        capacity=capacity,
    )
    return RowProgram(case=case, size=size, plan=plan)


def _verdicts(case: RowCase, backend: Any) -> KernelVerdicts:
    """Returns verdicts that allow the case's directions, and no others."""
    capabilities = {
        capability_name(direction, case.dim, rule)
        for direction in case.directions
        for rule in get_args(RuleKind)
    }
    return KernelVerdicts(
        backend=backend,
        verdicts=tuple(
            Verdict(
                capability=capability,
                is_equal=True,
                problem=None,
                speed_ratio=MIN_SPEED_RATIO,
                num_cases=1,
                date=datetime.date.today().isoformat(),
            )
            for capability in sorted(capabilities)
        ),
        absence="not part of this case",
    )
