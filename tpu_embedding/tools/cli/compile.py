"""The command `tpu-embedding compile`."""

import dataclasses
import sys
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh

from tpu_embedding.plan.device_mesh import SHARD_AXIS, SLICE_AXIS
from tpu_embedding.tools.cli.arguments import UsageError, use_cpu_only
from tpu_embedding.tools.compile_report.step_report import (
    CompileReport,
    compile_report,
    format_report,
)
from tpu_embedding.tools.compile_report.topology import topology_mesh
from tpu_embedding.tools.train.config import RunConfig, apply_overrides, load_config
from tpu_embedding.tools.train.steps import abstract_step, make_run_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """Compiles the train step of a config for TPUs, which this machine need not have.

    Prints if it fits into memory, and what it does with the tables: copies, exchanges,
    operations on SparseCore. Nothing is allocated, and no data are read. Exit status: 1
    if the step does not fit.
    """

    config: Annotated[str, tyro.conf.Positional]
    """Name of a config, or path of a Python file that defines `config`."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change of the config as KEY=VALUE; may be repeated."""

    topology: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A TPU slice, as GENERATION:CHIPS, such as v5p:2x2x1; may be repeated."""

    slices: int = 1
    """Number of such slices, connected by the data center network."""

    def run(self) -> int:
        """Prints the reports; returns the exit status."""
        if not self.topology:
            raise UsageError("--topology must name a TPU slice, such as v5e:2x4.")
        config = apply_overrides(load_config(self.config), self.set)
        use_cpu_only()
        try:
            meshes = [slices_mesh(name, self.slices) for name in self.topology]
        except (ImportError, ValueError) as error:
            raise UsageError(str(error)) from error
        reports = []
        for topology, mesh in zip(self.topology, meshes, strict=True):
            title = f"{config.name} for {topology}"
            print(f"compiling {title} ...", file=sys.stderr, flush=True)
            report = self._compile_for(config, topology, mesh)
            reports.append(report)
            print(format_report(report), end="\n\n", flush=True)
        return 0 if all(report.memory.fits for report in reports) else 1

    def _compile_for(
        self, config: RunConfig, topology: str, mesh: Mesh
    ) -> CompileReport:
        data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
        try:
            plan = make_run_plan(config, data, mesh)
            step, *arguments = abstract_step(config, data, plan)
            return compile_report(
                step, tuple(arguments), plan, name=config.name, topology=topology
            )
        except jax.errors.JaxRuntimeError as error:
            raise UsageError(f"XLA: {str(error).splitlines()[0]}") from error


def slices_mesh(topology: str, num_slices: int) -> Mesh:
    """Returns the mesh that the command `train` makes of such devices."""
    if num_slices == 1:
        return topology_mesh(topology)
    return topology_mesh(
        topology, (SLICE_AXIS, SHARD_AXIS), (num_slices, -1), num_slices=num_slices
    )
