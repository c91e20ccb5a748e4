"""Export for serving: programs and tables that need neither the model nor its mesh.

`save` writes a StableHLO program with the tables beside it, `load` runs it.
`save_saved_model` writes a TensorFlow SavedModel, `save_tables` the tables alone, and
`save_delta` the rows that changed since.
"""

from tpu_embedding.export.deltas import Delta as Delta
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
