"""The exit statuses of the command, and the error of a wrong command line."""

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, the status that shells report.


class UsageError(ValueError):
    """Raised if the command line contradicts itself or names something missing."""
