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

# Runs a command, which may fail because its resource is gone already. "not found" alone
# would also match a missing gcloud, or a missing plug-in of kubectl.
unless_gone() {
    local output
    output=$("$@" 2>&1 | tee -a /dev/stderr) ||
        grep --quiet --extended-regexp --regexp="NOT_FOUND|code=404" \
            --regexp="[Rr]esource '.*' was not found" \
            --regexp="doesn't have a resource type" <<<"$output"
}
