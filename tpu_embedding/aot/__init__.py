"""Ahead-of-time compilation: what a program does on a TPU, without a TPU."""

from tpu_embedding.aot.program import ProgramReport as ProgramReport
from tpu_embedding.aot.program import inspect_program as inspect_program
from tpu_embedding.aot.topology import abstract_arrays as abstract_arrays
from tpu_embedding.aot.topology import abstract_batch as abstract_batch
from tpu_embedding.aot.topology import topology_mesh as topology_mesh
