"""Compiles TPU programs ahead of time, without a TPU, and reports what they do.

docs/guides/compile_report.md explains the figures.
"""

from tpu_embedding.tools.compile_report.cycles import Cycles as Cycles
from tpu_embedding.tools.compile_report.cycles import count_cycles as count_cycles
from tpu_embedding.tools.compile_report.cycles import format_cycles as format_cycles
from tpu_embedding.tools.compile_report.hlo import (
    TableAccesses as TableAccesses,
)
from tpu_embedding.tools.compile_report.hlo import (
    inspect_program as inspect_program,
)
from tpu_embedding.tools.compile_report.step_report import (
    CompileReport as CompileReport,
)
from tpu_embedding.tools.compile_report.step_report import Memory as Memory
from tpu_embedding.tools.compile_report.step_report import (
    compile_report as compile_report,
)
from tpu_embedding.tools.compile_report.step_report import (
    format_report as format_report,
)
from tpu_embedding.tools.compile_report.topology import (
    abstract_arrays as abstract_arrays,
)
from tpu_embedding.tools.compile_report.topology import abstract_batch as abstract_batch
from tpu_embedding.tools.compile_report.topology import topology_mesh as topology_mesh
