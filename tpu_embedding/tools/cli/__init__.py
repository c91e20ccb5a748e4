"""The command `tpu-embedding`.

* `command`: parses the command line, runs a command, turns errors into exit statuses.
* `train`: the commands `train` and `evaluate`. `compile`, `inspect`, `export`,
  `doctor`: one each.
* `arguments`: what several commands share.
"""

from tpu_embedding.tools.cli.command import main as main
