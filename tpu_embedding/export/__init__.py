"""Exports models for serving, as programs and tables that need no model code or mesh.

`stablehlo`, `saved_model` and `deltas` hold the public calls. `program_inputs` and
`serving_program` turn a model into a program. `table_files` writes the model's tables,
and `documents` creates the directory, which appears once it is complete.
"""

from tpu_embedding.export.deltas import apply_delta as apply_delta
from tpu_embedding.export.deltas import save_delta as save_delta
from tpu_embedding.export.program_inputs import ExportError as ExportError
from tpu_embedding.export.saved_model import save_tensorflow as save_tensorflow
from tpu_embedding.export.stablehlo import ServedModel as ServedModel
from tpu_embedding.export.stablehlo import load as load
from tpu_embedding.export.stablehlo import save as save
from tpu_embedding.export.stablehlo import save_tables as save_tables
