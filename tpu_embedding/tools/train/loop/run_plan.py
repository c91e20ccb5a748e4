"""Makes the plan of a run, the same in all its processes, and describes it.

Each host has verdicts on kernels of its own (`kernel_verdicts.py`). Processes that
follow different ones would compile different programs, and wait for each other for
ever. So all follow those of process 0.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.distributed.job import current_job
from tpu_embedding.hardware import HardwareInfo, hardware_of_device
from tpu_embedding.kernel_verdicts import (
    RUN_DOCTOR,
    KernelVerdicts,
    verdicts_from_json,
)
from tpu_embedding.optimizers.names import optimizer_problem
from tpu_embedding.optimizers.rule_description import describe_rule
from tpu_embedding.placement import Sharded
from tpu_embedding.plan.backend_request import AUTO, KernelChoice, verdicts_for
from tpu_embedding.plan.device_mesh import SLICE_AXIS
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.mesh_options import resolve_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.batch import Dataset
from tpu_embedding.tools.train.config.run_config import RunConfig, json_of
from tpu_embedding.tools.train.errors import ConfigError, as_config_error


def make_run_plan(
    config: RunConfig,
    data: Dataset,
    mesh: Mesh | None = None,
    *,
    hardware: HardwareInfo | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> EmbeddingPlan:
    """Returns the plan of the model's embedding layer; see `make_plan`.

    Args:
      config: config of the run.
      data: opened data set, or its outline.
      mesh: mesh of the devices; None uses all devices.
      hardware: hardware to plan for; None uses that of the mesh's devices.
      compiler_options: XLA options of the train step, only for TPUs. They are added to
        the hardware's defaults, and override them.

    Raises:
      ConfigError: if a function of the config raises an error or returns a wrong value.
      ValueError: if the configuration contradicts itself, if compiler options are given
        without a TPU, or if XLA does not know them.
    """
    mesh = resolve_mesh(mesh)
    device = mesh.devices.flat[0]
    if hardware is None:
        hardware = hardware_of_device(device)
    hardware = hardware.with_compiler_options(compiler_options or {})
    with as_config_error(f"{type(config.model).__name__}.feature_config"):
        features = config.model.feature_config(data)
    if config.table_dtype is not None:
        features = _with_table_dtype(features, config.table_dtype)
    with as_config_error("RunConfig.make_table_optimizer"):
        optimizer = config.make_table_optimizer(config)
    if optimizer is None or optimizer_problem("optimizer", optimizer):
        raise ConfigError(
            "RunConfig.make_table_optimizer must return an optimizer for tables, got "
            f"{optimizer!r}; tpu_embedding.optimizers has ready ones."
        )
    plan = make_plan(
        features,
        mesh,
        optimizer=optimizer,
        placement=_placement_of(config, mesh),
        capacity=config.capacity,
        kernels=resolve_kernels(config.kernels, device, hardware),
        hardware=hardware,
    )
    if compiler_options:
        _check_compiler_options(plan)
    return plan


def _placement_of(config: RunConfig, mesh: Mesh) -> Sharded | None:
    """Returns the placement of tables without one of their own; None: the default."""
    if config.tables_split_over == "all" or SLICE_AXIS not in mesh.axis_names:
        return None
    axes = tuple(axis for axis in mesh.axis_names if axis != SLICE_AXIS)
    return Sharded(axes=axes)


def _with_table_dtype(
    features: dict[str, FeatureConfig], dtype: str
) -> dict[str, FeatureConfig]:
    """Returns the features with another storage type of their tables."""
    # Unnamed tables are told apart by identity.
    changed: dict[int, TableConfig] = {}

    def change(table: TableConfig) -> TableConfig:
        new = dataclasses.replace(table, dtype=np.dtype(dtype))
        return changed.setdefault(id(table), new)

    return {
        name: dataclasses.replace(
            feature,
            table=tuple(map(change, feature.table))
            if isinstance(feature.table, tuple)
            else change(feature.table),
        )
        for name, feature in features.items()
    }


def _check_compiler_options(plan: EmbeddingPlan) -> None:
    """Compiles a tiny program with the options, so that an unknown one fails early."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=plan.replicated)
    step = jax.jit(jnp.negative, compiler_options=plan.compiler_options)
    try:
        step.lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"compiler_options must be known to XLA for {plan.hardware.name}, got "
            f"{plan.compiler_options}: {str(error).splitlines()[0]}"
        ) from error


def resolve_kernels(
    kernels: str, device: jax.Device, hardware: HardwareInfo
) -> KernelChoice:
    """Returns the choice of kernels for `make_plan`, equal in all processes.

    With `"auto"` and several processes, all of them must call this function.

    Args:
      kernels: `RunConfig.kernels`.
      device: one of the plan's devices.
      hardware: the hardware that rows are laid out for.
    """
    if kernels != AUTO or current_job().num_processes == 1:
        return cast(KernelChoice, kernels)
    verdicts = verdicts_for(device, hardware)
    return AUTO if verdicts is None else of_first_process(verdicts)


def of_first_process(verdicts: KernelVerdicts) -> KernelVerdicts:
    """Returns the verdicts of process 0; every process must call it."""
    sent = current_job().broadcast("verdicts of kernels", verdicts.to_json())
    return verdicts_from_json(sent)


def describe_plan(plan: EmbeddingPlan) -> dict[str, Any]:
    """Returns the stacks of a plan, their layouts and optimizers, as JSON values."""
    return {
        "num_shards": plan.num_shards,
        "stacks": {
            stack.name: {
                "dim": stack.dim,
                "dtype": stack.layout.dtype_name,
                "rows_per_shard": stack.rows_per_shard,
                "rows_per_line": stack.layout.rows_per_line,
                "lanes": stack.layout.lanes,
                "num_lines": stack.layout.num_lines,
                "column_arrays": stack.layout.column_arrays,
                "optimizer": stack.optimizer
                and describe_rule(stack.optimizer.transformation),
                "slots": [
                    {"row_shape": list(slot.shape), "dtype": str(slot.dtype)}
                    for slot in stack.slots
                ],
                "tables": {
                    table.name: {
                        "vocabulary_size": json_of(table.config.vocabulary_size),
                        "row_offset": table.row_offset,
                    }
                    for table in stack.tables
                },
            }
            for stack in plan.stacks
        },
    }


def kernel_hint(plan: EmbeddingPlan) -> str | None:
    """Returns the way to verdicts that a plan lacks; None if it lacks none."""
    reasons = [choice.reason for stack in plan.stacks for choice in stack.backends]
    missing = [reason for reason in reasons if reason.endswith(RUN_DOCTOR)]
    if not missing:
        return None
    reason = missing[0].removeprefix("auto: ").removesuffix(f"; {RUN_DOCTOR}")
    return (
        f"XLA runs in place of some kernels: {reason}. Stop the run, {RUN_DOCTOR} on "
        "this host, and --resume follows its verdicts."
    )
