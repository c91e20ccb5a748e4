"""Launches training runs on TPUs of Google Cloud, by gcloud and kubectl.

A `Launch` is a value. A backend turns it into steps by pure functions. One runner
executes them or prints them. No cloud has been called yet: the commands are tested
against gcloud's own parser, the schemas of Kubernetes and JobSet, and fakes.
"""

from tpu_embedding.tools.launch.backends import BACKENDS as BACKENDS
from tpu_embedding.tools.launch.backends import Backend as Backend
from tpu_embedding.tools.launch.common_steps import fetch_results as fetch_results
from tpu_embedding.tools.launch.common_steps import what_deletes as what_deletes
from tpu_embedding.tools.launch.programs import PROGRAMS as PROGRAMS
from tpu_embedding.tools.launch.programs import Program as Program
from tpu_embedding.tools.launch.runner import LaunchError as LaunchError
from tpu_embedding.tools.launch.runner import print_steps as print_steps
from tpu_embedding.tools.launch.runner import run_steps as run_steps
from tpu_embedding.tools.launch.settings import Launch as Launch
from tpu_embedding.tools.launch.settings import load_launch as load_launch
from tpu_embedding.tools.launch.steps import Step as Step
