"""The command `tpu-embedding compile`."""

import dataclasses
import sys

import jax

from tpu_embedding.tools.cli.arguments import ConfigCommand, UsageError
from tpu_embedding.tools.compile_report.step_report import compile_report, format_report
from tpu_embedding.tools.compile_report.topology import topology_mesh
from tpu_embedding.tools.train.run_steps import abstract_step, make_run_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile(ConfigCommand):
    """Compiles a config's train step for a TPU slice, without needing a TPU.

    Prints whether the step fits in memory, and the compiler's estimate of its cycles.
    Also prints what the step does with the tables: copies, exchanges and SparseCore
    operations. Nothing is allocated, and no data are read. The exit status is 1 if the
    step does not fit.
    """

    topology: str
    """TPU slice as GENERATION:CHIPS, such as v5p:2x2x1."""

    slices: int = 1
    """Number of slices, connected by the data-center network."""

    def run(self) -> int:
        config = self.origin().load()
        # The program is for another machine, so this machine's devices stay untouched.
        jax.config.update("jax_platforms", "cpu")
        try:
            mesh = topology_mesh(self.topology, num_slices=self.slices)
        except (ImportError, ValueError) as error:
            raise UsageError(str(error)) from error
        name, topology = config.name, self.topology
        print(f"compiling {name} for {topology} ...", file=sys.stderr, flush=True)
        # An outline has the sizes of the data, so the command needs no data files.
        data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
        plan = make_run_plan(config, data, mesh)
        step, *arguments = abstract_step(config, data, plan)
        report = compile_report(
            step, tuple(arguments), plan, name=name, topology=topology
        )
        print(format_report(report))
        return 0 if report.memory.fits else 1
