"""The command `tpu-embedding`."""

# First of all: the imports below take seconds, in which signals arrive, too.
from tpu_embedding.tools.jobs import early_signals as _early_signals  # noqa: F401

# isort: split
from tpu_embedding.tools.cli.command import main as main
from tpu_embedding.tools.cli.command import make_parser as make_parser
from tpu_embedding.tools.jobs.exit_status import FAILED as FAILED
from tpu_embedding.tools.jobs.exit_status import INTERRUPTED as INTERRUPTED
from tpu_embedding.tools.jobs.exit_status import WRONG_USAGE as WRONG_USAGE
