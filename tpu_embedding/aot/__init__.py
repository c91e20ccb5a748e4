"""Ahead-of-time compilation and inspection of TPU programs, without a TPU."""

from tpu_embedding.aot.floor import Floor as Floor
from tpu_embedding.aot.floor import embedding_floor as embedding_floor
from tpu_embedding.aot.html import render_html as render_html
from tpu_embedding.aot.memory import Memory as Memory
from tpu_embedding.aot.program import ProgramReport as ProgramReport
from tpu_embedding.aot.program import inspect_program as inspect_program
from tpu_embedding.aot.programs import Program as Program
from tpu_embedding.aot.programs import ProgramMemory as ProgramMemory
from tpu_embedding.aot.programs import program_memory as program_memory
from tpu_embedding.aot.report import CompileReport as CompileReport
from tpu_embedding.aot.report import compile_report as compile_report
from tpu_embedding.aot.text import format_comparison as format_comparison
from tpu_embedding.aot.text import format_report as format_report
from tpu_embedding.aot.topology import abstract_arrays as abstract_arrays
from tpu_embedding.aot.topology import abstract_batch as abstract_batch
from tpu_embedding.aot.topology import topology_mesh as topology_mesh
