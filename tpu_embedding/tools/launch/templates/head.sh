#!/bin/bash
# %%title
# Printed by `tpu-embedding launch`. Read it before you run it.
#
#   bash FILE          creates what is missing and starts the run; may be repeated
#   bash FILE logs     follows the log of the first host, until Ctrl-C
#   bash FILE delete   deletes the machines; the bucket stays
#
# What ends the machines, which cost money until then:
%%what_deletes
set -euo pipefail
%%variables
