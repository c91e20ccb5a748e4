"""Saves and restores training state, and imports tables from other libraries.

A checkpoint is an ordinary Orbax checkpoint. Each table in it is one array with its
rows in natural order, so any plan on any devices can read it.

Read `saving` first. `split_state` finds the tables in a state, `saved_leaves` describes
them, `arrays` moves rows to and from disk, `state_file` seals and checks `state.json`,
and `restoring` restores the state.
"""

from tpu_embedding.checkpoint.arrays import read_table as read_table
from tpu_embedding.checkpoint.imports.importing import ImportReport as ImportReport
from tpu_embedding.checkpoint.imports.importing import (
    import_into_stacks as import_into_stacks,
)
from tpu_embedding.checkpoint.imports.importing import import_tables as import_tables
from tpu_embedding.checkpoint.imports.opening import (
    open_stacked_tables as open_stacked_tables,
)
from tpu_embedding.checkpoint.imports.opening import open_tables as open_tables
from tpu_embedding.checkpoint.imports.source import TableSource as TableSource
from tpu_embedding.checkpoint.records import ArrayRecord as ArrayRecord
from tpu_embedding.checkpoint.records import CheckpointError as CheckpointError
from tpu_embedding.checkpoint.records import CheckpointRecord as CheckpointRecord
from tpu_embedding.checkpoint.records import TableRecord as TableRecord
from tpu_embedding.checkpoint.restoring import RestoreState as RestoreState
from tpu_embedding.checkpoint.saving import SaveState as SaveState
from tpu_embedding.checkpoint.saving import StateHandler as StateHandler
from tpu_embedding.checkpoint.state_file import describe as describe
