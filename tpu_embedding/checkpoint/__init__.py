"""Saves and restores training state."""

from tpu_embedding.checkpoint.run_checkpoints import CheckpointError as CheckpointError
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints as RunCheckpoints
from tpu_embedding.checkpoint.run_checkpoints import describe_plan as describe_plan
from tpu_embedding.checkpoint.run_checkpoints import describe_state as describe_state
