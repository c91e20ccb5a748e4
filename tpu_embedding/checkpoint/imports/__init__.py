"""Imports tables that other libraries and programs have written."""

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
