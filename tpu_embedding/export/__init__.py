"""Export for serving: programs and tables that need neither the model nor its mesh.

Public calls, and what they write:

    stablehlo        save and load: a StableHLO program with its tables beside it;
                     save_tables: the tables alone
    saved_model      save_saved_model: a TensorFlow SavedModel
    deltas           save_delta, read_delta, apply_delta: rows that changed since

From a model to its program and tables:

    example          an example batch gives the names and kinds of the inputs
    serving_program  traces the model for one device, without values of tables
    signature        inputs and outputs of the program, as JSON
    feeding          turns the arguments of a call into the arrays of the program
    saved_strings    turns strings into ids inside of a SavedModel
    layer_tables     the tables of a model, and their rows by blocks
    dynamic_tables   the ids of dynamic tables, for programs and for files
    row_formats      float32, bfloat16 or int8 rows, and the rounding error of each

From there to files:

    artifact         the directory of an export, and its export.json
    documents        reads and writes JSON documents
    document_schemas the fields of these documents, and their check
    digests          checksums of the files
    tensor_files     safetensors files, written by blocks of rows
    writing          one process writes, in a job of several
    delta_chain      the order of an export and its deltas
    delta_tables     the tables in a delta, and the checks of them
"""

from tpu_embedding.export.deltas import Delta as Delta
from tpu_embedding.export.deltas import DynamicTableDelta as DynamicTableDelta
from tpu_embedding.export.deltas import TableDelta as TableDelta
from tpu_embedding.export.deltas import apply_delta as apply_delta
from tpu_embedding.export.deltas import read_delta as read_delta
from tpu_embedding.export.deltas import save_delta as save_delta
from tpu_embedding.export.saved_model import save_saved_model as save_saved_model
from tpu_embedding.export.signature import ExportError as ExportError
from tpu_embedding.export.stablehlo import ServedModel as ServedModel
from tpu_embedding.export.stablehlo import load as load
from tpu_embedding.export.stablehlo import save as save
from tpu_embedding.export.stablehlo import save_tables as save_tables
