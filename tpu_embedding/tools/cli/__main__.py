"""Runs the command as `python -m tpu_embedding.tools.cli`."""

import sys

from tpu_embedding.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
