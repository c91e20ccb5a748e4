"""Export for serving: programs and tables that need neither the model nor its mesh.

Public calls, and what they write:

    stablehlo        save and load: a StableHLO program with its tables next to it;
                     save_tables: the tables alone
    saved_model      save_tensorflow: a TensorFlow SavedModel of the same program
    deltas           save_delta and apply_delta: what differs between two exports

From a model to its program and tables:

    program_inputs   the inputs of the program: signature, example batch, and the arrays
                     of a call
    serving_program  traces the model for one device, without values of tables

From there to files:

    documents        the directory, export.json, and digests of the files
    table_files      the tables of a model and their ids, in safetensors files of
                     float32, bfloat16 or int8 rows, by blocks
"""

from tpu_embedding.export.deltas import apply_delta as apply_delta
from tpu_embedding.export.deltas import save_delta as save_delta
from tpu_embedding.export.program_inputs import ExportError as ExportError
from tpu_embedding.export.saved_model import save_tensorflow as save_tensorflow
from tpu_embedding.export.stablehlo import ServedModel as ServedModel
from tpu_embedding.export.stablehlo import load as load
from tpu_embedding.export.stablehlo import save as save
from tpu_embedding.export.stablehlo import save_tables as save_tables
