"""Ahead-of-time compilation and inspection of TPU programs, without a TPU.

* `step_report`: `compile_report` compiles a train step, and makes the report.
* `topology`: meshes of TPUs that are not there.
* `device_memory`: memory of a program on one device. `other_programs`: the same of the
  programs beside the train step. `memory_plot`: the picture of both.
* `table_accesses`: how a program treats its tables.
* `cost`: modelled traffic by operation, from `traffic` (of one instruction) and
  `trip_counts` (of loops). `hlo` parses the program.
* `floor`: the minimum traffic. `bandwidth`: from bytes to modelled time.
* `text`: the report as `tpu-embedding compile` prints it.
"""

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
