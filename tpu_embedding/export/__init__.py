"""Exports models for serving, as programs and tables that need no model code or mesh.

Public calls:

    stablehlo        save, load and save_tables: a StableHLO program with its tables, or
                     the tables alone
    saved_model      save_tensorflow: a TensorFlow SavedModel of the same program
    deltas           save_delta and apply_delta: the differences between two exports

From a model to its program and tables:

    program_inputs   the program's inputs: their signature, an example batch, and the
                     arrays of a call
    serving_program  traces the model for one device, without table values

From program and tables to files:

    documents        the directory, export.json, and file digests
    table_files      a model's tables and ids as safetensors files of float32, bfloat16
                     or int8 rows, written in blocks
"""

from tpu_embedding.export.deltas import apply_delta as apply_delta
from tpu_embedding.export.deltas import save_delta as save_delta
from tpu_embedding.export.program_inputs import ExportError as ExportError
from tpu_embedding.export.saved_model import save_tensorflow as save_tensorflow
from tpu_embedding.export.stablehlo import ServedModel as ServedModel
from tpu_embedding.export.stablehlo import load as load
from tpu_embedding.export.stablehlo import save as save
from tpu_embedding.export.stablehlo import save_tables as save_tables
