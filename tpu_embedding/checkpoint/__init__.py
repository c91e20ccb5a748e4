"""Saves and restores the state of a training, and imports tables of other libraries.

Files are independent of devices and plans: a table is one array in natural row order,
in an ordinary orbax checkpoint.

    saving           te.save and te.restore, and the orbax handler they use
    restoring        reads a checkpoint into a state, under any plan, by blocks
    split_state      finds the embedding layers in a state, and its other leaves
    saved_leaves     the leaves to save, their description, and the ids of dynamic
                     tables
    arrays           reads and writes arrays on the disk, chunk by chunk
    records          names and descriptions of the files, and the error of this folder
    state_file       state.json: written, sealed with checksums, read and checked
    differences      everything in which a checkpoint and a state differ
    imports/         tables that other libraries wrote
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
