"""Saves and restores training state, and imports tables of other libraries."""

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
