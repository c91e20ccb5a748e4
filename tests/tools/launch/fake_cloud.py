"""A fake of gcloud, kubectl and sleep, which remembers resources and calls.

It is installed under each name in a folder of its own, and keeps its memory in the
folder's `memory.json`:

  resources: "kind name" of all that exists, such as "container clusters dlrm".
  states: states of the queued resource, in order; the last one stays.
  ended: state of the job, as JobSet tells it; "" while it runs.
  failures: a call whose line contains one of these texts fails.
  calls: arguments of each call, and its standard input last.
"""

import fcntl
import json
import pathlib
import sys

MEMORY = dict(resources=[], states=["ACTIVE"], ended="", failures=[], calls=[])
NAMES = ("gcloud", "kubectl", "sleep")
GIVEN = (
    "machine-types describe",
    "accelerator-types describe",
    "service-accounts describe",
)
CONTROLLER = "customresourcedefinition jobsets.jobset.x-k8s.io"


def require(resources, name):
    """Raises KeyError if there is no such resource."""
    if name not in resources:
        raise KeyError(name)


def answer(memory, argv, stdin):
    """Returns what a call prints.

    Raises:
      KeyError: if there is no such resource.
      ValueError: if the call is to fail.
    """
    resources, words = memory["resources"], [w for w in argv if not w.startswith("--")]
    line = " ".join(argv)
    if any(failure in line for failure in memory["failures"]):
        raise ValueError("PERMISSION_DENIED")
    if argv[0] == "kubectl":
        if "https://github.com" in line:
            resources.append(CONTROLLER)
        elif words[1] == "get" and words[2] == "jobset":
            return memory["ended"]
        elif words[1] == "get":
            require(resources, CONTROLLER)
        elif words[1:3] == ["delete", "jobset"]:
            memory["ended"] = ""
        return ""
    if "get-credentials" in words:
        require(resources, f"container clusters {words[-1]}")
    if "ssh" in words:
        require(
            resources, f"compute tpus queued-resources {words[5].rpartition('-')[0]}"
        )
    verb = next((w for w in words if w in ("create", "describe", "delete")), None)
    if argv[0] == "sleep" or verb is None or any(given in line for given in GIVEN):
        return ""
    name = f"{' '.join(words[1 : words.index(verb)])} {words[-1]}"
    if verb == "create":
        assert name not in resources, f"{name} exists"
        resources.append(name)
        return ""
    require(resources, name)
    if verb == "delete":
        resources.remove(name)
    elif "--format=value(state.state)" in argv:
        states = memory["states"]
        return states.pop(0) if len(states) > 1 else states[0]
    return ""


def main():
    path = pathlib.Path(sys.argv[0])
    argv = [path.name, *sys.argv[1:]]
    stdin = sys.stdin.read() if "-" in argv or "--filename=-" in argv else ""
    with path.with_name("memory.json").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # hosts are reached at the same time
        memory = json.load(file)
        memory["calls"].append([*argv, stdin])
        try:
            print(answer(memory, argv, stdin))
            status = 0
        except (KeyError, ValueError) as error:
            gone = "NOT_FOUND: " if isinstance(error, KeyError) else ""
            print(f"ERROR: {gone}{error}", file=sys.stderr)
            status = 1
        file.seek(0)
        file.truncate()
        json.dump(memory, file)
    sys.exit(status)


if __name__ == "__main__":
    main()
