"""Runs the command as `python -m tpu_embedding.cli`."""

import sys

from tpu_embedding.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
