"""Ahead-of-time compilation and inspection of TPU programs, without a TPU."""

from tpu_embedding.tools.compile_report.device_memory import Memory as Memory
from tpu_embedding.tools.compile_report.floor import Floor as Floor
from tpu_embedding.tools.compile_report.floor import embedding_floor as embedding_floor
from tpu_embedding.tools.compile_report.memory_plot import plot_memory as plot_memory
from tpu_embedding.tools.compile_report.other_programs import (
    ProgramMemory as ProgramMemory,
)
from tpu_embedding.tools.compile_report.other_programs import (
    UncompiledProgram as UncompiledProgram,
)
from tpu_embedding.tools.compile_report.other_programs import (
    program_memory as program_memory,
)
from tpu_embedding.tools.compile_report.step_report import (
    CompileReport as CompileReport,
)
from tpu_embedding.tools.compile_report.step_report import (
    compile_report as compile_report,
)
from tpu_embedding.tools.compile_report.table_accesses import (
    TableAccesses as TableAccesses,
)
from tpu_embedding.tools.compile_report.table_accesses import (
    inspect_program as inspect_program,
)
from tpu_embedding.tools.compile_report.text import (
    format_comparison as format_comparison,
)
from tpu_embedding.tools.compile_report.text import format_report as format_report
from tpu_embedding.tools.compile_report.topology import (
    abstract_arrays as abstract_arrays,
)
from tpu_embedding.tools.compile_report.topology import abstract_batch as abstract_batch
from tpu_embedding.tools.compile_report.topology import topology_mesh as topology_mesh
