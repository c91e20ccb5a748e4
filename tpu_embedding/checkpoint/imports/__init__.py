"""Imports tables that other libraries and programs have written.

A source is opened, matched with the tables of a model, and written to them:

    opening        open_tables: finds the format, and returns a TableSource
    source         TableSource: the tables of a file, whose rows are read by ranges
    match          pairs the tables and slot variables of a source with a model's, and
                   tells what was imported, dropped and kept
    importing      import_tables: writes the rows into the model, by blocks

Formats:

    named_arrays   arrays by name, safetensors, TorchRec's and dynamicemb's files
    tensorflow     checkpoints, read by TensorFlow
    orbax          arrays of checkpoints by their paths
    stacked        rows of tables that jax-tpu-embedding or TensorFlow stacked
"""

from tpu_embedding.checkpoint.imports.importing import (
    import_into_stacks as import_into_stacks,
)
from tpu_embedding.checkpoint.imports.importing import (
    import_tables as import_tables,
)
from tpu_embedding.checkpoint.imports.match import ImportReport as ImportReport
from tpu_embedding.checkpoint.imports.opening import open_tables as open_tables
from tpu_embedding.checkpoint.imports.source import TableSource as TableSource
from tpu_embedding.checkpoint.imports.stacked import (
    open_stacked_tables as open_stacked_tables,
)
