"""Jobs of several processes: start them, agree, and end together.

`start` is the first call of a program that runs on several hosts. The training command
calls it by itself.

* `starting`: starts JAX in all processes, after a roll call.
* `cluster_detection`: finds the coordinator, the number of processes and that of this
  one, from arguments or the environment.
* `roll_call`: waits until each process has come, and refuses a second one of a number
  other than 0.
* `job`: exchanges values and agrees on facts between the processes.
* `store`: the texts that the processes share, in JAX's coordination service.
* `notices`: tells an error of one process to all, and ends them together.
* `poller`: a thread that looks at something regularly.
* `output`: prints lines that may have no reader any more.
"""

from tpu_embedding.distributed.cluster_detection import (
    COORDINATOR_PORT as COORDINATOR_PORT,
)
from tpu_embedding.distributed.cluster_detection import StartError as StartError
from tpu_embedding.distributed.job import AbsentProcessError as AbsentProcessError
from tpu_embedding.distributed.job import DisagreementError as DisagreementError
from tpu_embedding.distributed.job import Job as Job
from tpu_embedding.distributed.job import current_job as current_job
from tpu_embedding.distributed.notices import ending_together as ending_together
from tpu_embedding.distributed.starting import HEARTBEAT_SECONDS as HEARTBEAT_SECONDS
from tpu_embedding.distributed.starting import START_SECONDS as START_SECONDS
from tpu_embedding.distributed.starting import start as start
