"""The exit statuses of a worker, those of the command `train`."""

DONE = 0
WRONG_USAGE = 2
STOPPED = 75
INTERRUPTED = 130
