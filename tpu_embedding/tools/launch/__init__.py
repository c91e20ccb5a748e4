"""Prints the script of a training run on TPUs of Google Cloud.

A `Launch` is a value, read from a file. `make_script` fills the templates with it. The
user reads the script and runs it. No cloud has been called yet: the commands are tested
against gcloud's own parser, the schemas of Kubernetes and JobSet, and fakes.

* `settings`: a `Launch`, and the file that it is read from.
* `slices`: sizes and machines of the slices of each generation.
* `script`: fills the templates of `templates/`.
"""

from tpu_embedding.tools.launch.script import PROGRAMS as PROGRAMS
from tpu_embedding.tools.launch.script import Program as Program
from tpu_embedding.tools.launch.script import make_script as make_script
from tpu_embedding.tools.launch.script import what_deletes as what_deletes
from tpu_embedding.tools.launch.settings import Launch as Launch
from tpu_embedding.tools.launch.settings import load_launch as load_launch
