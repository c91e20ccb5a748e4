"""The command `tpu-embedding`."""

from tpu_embedding.cli.command import main as main
from tpu_embedding.cli.command import make_parser as make_parser
from tpu_embedding.cli.exit_status import FAILED as FAILED
from tpu_embedding.cli.exit_status import INTERRUPTED as INTERRUPTED
from tpu_embedding.cli.exit_status import WRONG_USAGE as WRONG_USAGE
