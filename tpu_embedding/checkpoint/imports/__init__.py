"""Imports tables that other libraries and programs have written.

A source is opened, matched with the tables of a model, and written to them:

    opening        open_tables: finds the format, and returns a TableSource
    source         TableSource: the tables of a file, whose rows are read by ranges
    match          pairs the tables of a source with those of a model
    slot_names     tells which slot variables mean the same
    row_ids        checks the ids of rows, for dynamic tables
    placed_rows    places these ids in their buckets, and their rows beside them
    importing      import_tables: writes the rows into the model, by blocks
    report         tells what was imported, dropped and kept

Formats, and the ways in which libraries lay out their tables:

    arrays, safetensors, torchrec      arrays by name, and state dicts
    managed_collisions                 ids that TorchRec keeps beside its tables
    dynamicemb                         files of keys and values
    tensorflow, tensorflow_reader      checkpoints of TensorFlow, read by TensorFlow
    own                                checkpoints of this package
    orbax, keras, stacked_orbax        checkpoints of Orbax, keras-rs, jax-tpu-embedding
    sparse_core, rotation              rows of tables that SparseCore libraries stacked
"""

from tpu_embedding.checkpoint.imports.importing import (
    import_into_stacks as import_into_stacks,
)
from tpu_embedding.checkpoint.imports.importing import (
    import_tables as import_tables,
)
from tpu_embedding.checkpoint.imports.opening import open_tables as open_tables
from tpu_embedding.checkpoint.imports.report import ImportReport as ImportReport
from tpu_embedding.checkpoint.imports.source import TableSource as TableSource
from tpu_embedding.checkpoint.imports.stacked_orbax import (
    open_stacked_tables as open_stacked_tables,
)
