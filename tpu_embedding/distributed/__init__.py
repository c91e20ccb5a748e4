"""Jobs of several processes: start them, agree, and end together.

`start` is the first call of a program that runs on several hosts. The training command
calls it by itself.
"""

from tpu_embedding.distributed.job import AbsentProcessError as AbsentProcessError
from tpu_embedding.distributed.job import DisagreementError as DisagreementError
from tpu_embedding.distributed.job import Job as Job
from tpu_embedding.distributed.job import current_job as current_job
from tpu_embedding.distributed.notices import ending_together as ending_together
from tpu_embedding.distributed.place import COORDINATOR_PORT as COORDINATOR_PORT
from tpu_embedding.distributed.place import StartError as StartError
from tpu_embedding.distributed.starting import HEARTBEAT_SECONDS as HEARTBEAT_SECONDS
from tpu_embedding.distributed.starting import START_SECONDS as START_SECONDS
from tpu_embedding.distributed.starting import start as start
