"""Saves and restores the state of a training, and imports tables of other libraries.

Files are independent of devices and plans: a table is one array in natural row order.

    saving           te.save and te.restore: one state in one directory
    run_checkpoints  the checkpoints of a run by step, for the training command
    state_handler    the Orbax handler behind both, which writes in the background
    restoring        reads a checkpoint into a state, under any plan
    split_state      finds the embedding layers in a state, and its other leaves
    table_arrays     streams tables and slot variables to files and back, by blocks
    dynamic_tables   the ids of dynamic tables, and their places after a restore
    dense_leaves     saves and restores the other leaves by Orbax
    arrays           one array on the disk, chunk by chunk, by tensorstore
    format           names and descriptions of the files, read without devices
    differences      everything in which a checkpoint and a state differ
    row_statistics   norms of rows, and rows never touched, from the files alone
    id_statistics    load, ages and uses of the ids of dynamic tables, from the files
    errors           exceptions of this folder
    failed_saves     ends a save that fails on all processes, with one error
    imports/         tables that other libraries wrote
"""

from tpu_embedding.checkpoint.arrays import read_table as read_table
from tpu_embedding.checkpoint.errors import CheckpointError as CheckpointError
from tpu_embedding.checkpoint.errors import (
    DamagedCheckpointError as DamagedCheckpointError,
)
from tpu_embedding.checkpoint.format import ArrayRecord as ArrayRecord
from tpu_embedding.checkpoint.format import CheckpointRecord as CheckpointRecord
from tpu_embedding.checkpoint.format import TableRecord as TableRecord
from tpu_embedding.checkpoint.format import describe as describe
from tpu_embedding.checkpoint.imports import ImportReport as ImportReport
from tpu_embedding.checkpoint.imports import TableSource as TableSource
from tpu_embedding.checkpoint.imports import import_into_stacks as import_into_stacks
from tpu_embedding.checkpoint.imports import import_tables as import_tables
from tpu_embedding.checkpoint.imports import open_stacked_tables as open_stacked_tables
from tpu_embedding.checkpoint.imports import open_tables as open_tables
from tpu_embedding.checkpoint.restoring import RestoreState as RestoreState
from tpu_embedding.checkpoint.row_statistics import NormHistogram as NormHistogram
from tpu_embedding.checkpoint.row_statistics import TableStatistics as TableStatistics
from tpu_embedding.checkpoint.row_statistics import table_statistics as table_statistics
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints as RunCheckpoints
from tpu_embedding.checkpoint.state_handler import SaveState as SaveState
from tpu_embedding.checkpoint.state_handler import StateHandler as StateHandler
