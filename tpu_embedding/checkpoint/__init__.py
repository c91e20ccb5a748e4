"""Saves and restores training state."""

from tpu_embedding.checkpoint.arrays import read_table as read_table
from tpu_embedding.checkpoint.errors import CheckpointError as CheckpointError
from tpu_embedding.checkpoint.errors import (
    DamagedCheckpointError as DamagedCheckpointError,
)
from tpu_embedding.checkpoint.format import describe as describe
from tpu_embedding.checkpoint.restoring import RestoreState as RestoreState
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints as RunCheckpoints
from tpu_embedding.checkpoint.state_handler import SaveState as SaveState
from tpu_embedding.checkpoint.state_handler import StateHandler as StateHandler
