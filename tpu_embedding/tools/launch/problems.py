"""Explains failures of gcloud and kubectl in one line, with the way out."""

import dataclasses
import re
from typing import Final

NOT_FOUND: Final = re.compile(
    r"NOT_FOUND|\bNotFound\b|was not found|not found: 404|code=404|HTTPError 404"
    r"|could not be found",
)
"""Message of a command that describes a resource which does not exist."""


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A kind of failure.

    Attributes:
      pattern: matches the message of gcloud or kubectl.
      summary: what is wrong.
      way_out: what the user can do.
    """

    pattern: re.Pattern[str]
    summary: str
    way_out: str


def _problem(pattern: str, summary: str, way_out: str) -> _Problem:
    return _Problem(re.compile(pattern, re.IGNORECASE), summary, way_out)


# The first that matches counts.
_PROBLEMS: Final = (
    _problem(
        r"active account selected|gcloud auth login|reauthentication|credentials (were|"
        r"have) .*(invalid|expired)|could not find default credentials",
        "you are not logged in",
        "run gcloud auth login",
    ),
    _problem(
        r"SERVICE_DISABLED|has not been used in project|API .*not enabled"
        r"|it is disabled",
        "an API of the project is not enabled",
        "run gcloud services enable compute.googleapis.com container.googleapis.com "
        "tpu.googleapis.com, then wait a minute",
    ),
    _problem(
        r"\bquota\b(?! project)|QUOTA_EXCEEDED",
        "the quota of the project is too small",
        "ask for more on the console's page of quotas; spot has a quota of its own, "
        "and so have the Cloud TPU API and Compute Engine",
    ),
    _problem(
        r"ZONE_RESOURCE_POOL_EXHAUSTED|STOCKOUT|no (more|available) capacity"
        r"|enough resources available|resource pool exhausted|out of capacity",
        "the zone has no capacity now",
        "try later or in another zone, or use capacity flex_start, spot or reservation",
    ),
    _problem(
        r"PERMISSION_DENIED|does not have permission|permission '?[\w.]+'? (denied|for)"
        r"|required '?[\w.]+'? permission|\bForbidden\b|caller does not have",
        "you lack a permission",
        "let an owner of the project grant the roles of the guide to launching",
    ),
    _problem(
        r"ALREADY_EXISTS|already exists",
        "it was created by someone else at the same moment",
        "run the command again",
    ),
    _problem(
        r"unrecognized arguments|invalid choice",
        "gcloud is too old for this command",
        "run gcloud components update",
    ),
    _problem(
        r"field is immutable|value is immutable",
        "a job of this name exists, with other settings",
        "run tpu-embedding launch stop first",
    ),
    _problem(
        r"no matches for kind \"JobSet\"|doesn't have a resource type \"jobset",
        "the cluster has no JobSet controller",
        "run tpu-embedding launch create",
    ),
    _problem(
        r"is waiting to start|no resources found",
        "the pods do not run yet",
        "look at tpu-embedding launch status; nodes need minutes, or longer without "
        "capacity",
    ),
    _problem(
        r"connection timed out|connection refused|port 22|exit code 255"
        r"|exited with return code \[255\]",
        "a host does not answer on SSH",
        "wait a minute after its start; a firewall rule must admit port 22",
    ),
)


def explain(message: str) -> str:
    """Returns what went wrong and the way out, in one line.

    Args:
      message: standard error of a command that failed.

    Example:
      >>> explain("ERROR: Quota 'TPUS' exceeded.").split(":")[0]
      'the quota of the project is too small'
    """
    told = _last_line(message)
    for problem in _PROBLEMS:
        if problem.pattern.search(message):
            return f"{problem.summary}: {problem.way_out}. ({told})"
    return told or "it gave no reason"


def _last_line(message: str) -> str:
    """Returns the line that names the error: the last that begins so, or the last."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"ERROR|error:|Error", line)]
    return (errors or lines or [""])[-1]
