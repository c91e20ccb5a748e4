"""A fake of gcloud, kubectl and tpu-embedding, which remembers resources.

Tests call it as an object. As a program, under one of these names in a folder of its
own, it keeps its memory in the folder's `memory.json`.
"""

import fcntl
import json
import pathlib
import re
import sys


def bucket(flags):
    return {
        "hierarchicalNamespace": {"enabled": "enable-hierarchical-namespace" in flags}
    }


def cluster(flags):
    enabled = "GcsFuseCsiDriver" in flags.get("addons", "")
    return {
        "workloadIdentityConfig": {"workloadPool": flags.get("workload-pool")},
        "addonsConfig": {"gcsFuseCsiDriverConfig": {"enabled": enabled}},
    }


def node_pool(flags):
    config = {"machineType": flags["machine-type"]}
    if "spot" in flags:
        config["spot"] = True
    placement = {
        "tpuTopology": flags.get("tpu-topology"),
        "policyName": flags.get("placement-policy"),
    }
    return {"config": config, "placementPolicy": placement}


def policy(flags):
    return {"workloadPolicy": {"acceleratorTopology": flags["accelerator-topology"]}}


def template(flags):
    scheduling = {"provisioningModel": flags["provisioning-model"]}
    return {
        "properties": {"machineType": flags["machine-type"], "scheduling": scheduling}
    }


def group(flags):
    url = f"https://cloud/global/instanceTemplates/{flags['template']}"
    return {"targetSize": int(flags["size"]), "instanceTemplate": url}


def queued_resource(flags):
    node = {"acceleratorType": flags["accelerator-type"]}
    return {"tpu": {"nodeSpec": [{"node": node}]}, "state": {"state": "ACTIVE"}}


KINDS = {
    "storage buckets": bucket,
    "container clusters": cluster,
    "container node-pools": node_pool,
    "compute resource-policies": policy,
    "compute instance-templates": template,
    "compute instance-groups managed": group,
    "compute tpus queued-resources": queued_resource,
}
CONTROLLER = "customresourcedefinition jobsets.jobset.x-k8s.io"
OFFERS = (
    "compute machine-types",
    "compute tpus accelerator-types",
    "iam service-accounts describe",
)


class Refusal(Exception):
    """What a program prints on standard error, with exit status 1."""


class Cloud:
    """Resources by kind and name, and all calls.

    Attributes:
      resources: "kind name" to the JSON that describes it.
      failures: lists (match, stderr, status); a call whose line contains `match` fails.
      calls: arguments of each call, and its standard input last.
    """

    def __init__(self, resources=(), failures=(), calls=()):
        self.resources = dict(resources)
        self.failures = list(failures)
        self.calls = list(calls)

    def fail(self, match, stderr, status=1):
        self.failures = [(match, stderr, status)]

    def take_calls(self):
        """Returns the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def call(self, argv, stdin):
        """Returns exit status, standard output and standard error of a call."""
        self.calls.append([*argv, stdin])
        line = " ".join(argv)
        for match, stderr, status in self.failures:
            if match in line:
                return status, "", stderr
        program, *rest = argv
        words = [word for word in rest if not word.startswith("--")]
        flags = dict(
            word[2:].partition("=")[::2] for word in rest if word.startswith("--")
        )
        answer = {"gcloud": self._gcloud, "kubectl": self._kubectl}.get(program)
        try:
            return 0, answer(words, flags, stdin) if answer else "", ""
        except Refusal as refusal:
            return 1, "", str(refusal)

    def _gcloud(self, words, flags, stdin):
        del stdin
        words = words[1:] if words[0] == "alpha" else words
        line = " ".join(words)
        if line.startswith(OFFERS):
            return "{}"
        kind = next((kind for kind in KINDS if line.startswith(f"{kind} ")), None)
        if kind is None:
            return ""
        verb, name = words[len(kind.split())], f"{kind} {words[-1]}"
        if verb == "create":
            if name in self.resources:
                raise Refusal(f"ERROR: The resource '{words[-1]}' already exists")
            self.resources[name] = KINDS[kind](flags)
        elif verb in ("describe", "delete", "list-instances", "get-credentials"):
            if name not in self.resources:
                raise Refusal(f"ERROR: (gcloud) NOT_FOUND: {words[-1]} was not found")
            if verb == "delete":
                del self.resources[name]
            elif verb == "describe":
                return json.dumps(self.resources[name])
            elif verb == "list-instances":
                size = self.resources[name]["targetSize"]
                names = (
                    f"{words[-1]}-{index * 7 % 100:02d}xy" for index in range(size)
                )
                return "\n".join(names)
        return ""

    def _kubectl(self, words, flags, stdin):
        cluster = flags["context"].rpartition("_")[2]
        if f"container clusters {cluster}" not in self.resources:
            raise Refusal("Unable to connect to the server: no such host")
        if words[0] == "apply" and flags["filename"].startswith("https:"):
            self.resources[CONTROLLER] = {}
        elif words[0] == "apply" and "\nkind: JobSet\n" in stdin:
            # Enough of the manifest for what is compared; the fake has no YAML.
            name, checksum = re.search(
                r"\n  name: (\S+)\n.*\n    tpu-embedding-checksum: '?(\w+)", stdin, re.S
            ).groups()
            annotations = {"tpu-embedding-checksum": checksum}
            self.resources[f"jobset {name}"] = {
                "metadata": {"annotations": annotations}
            }
        elif words[1:2] == ["jobset"]:
            name = " ".join(words[1:])
            if words[0] == "delete":
                self.resources.pop(name, None)
            elif name not in self.resources:
                raise Refusal(f'Error from server (NotFound): "{words[2]}" not found')
            else:
                return json.dumps(self.resources[name])
        elif words[:2] == ["get", "customresourcedefinition"]:
            if CONTROLLER not in self.resources:
                raise Refusal('Error from server (NotFound): "jobsets" not found')
            return "{}"
        return ""


def main():
    path = pathlib.Path(sys.argv[0])
    stdin = sys.stdin.read()
    with path.with_name("memory.json").open("r+") as memory:
        fcntl.flock(memory, fcntl.LOCK_EX)  # hosts are reached at the same time
        cloud = Cloud(**json.load(memory))
        status, stdout, stderr = cloud.call([path.name, *sys.argv[1:]], stdin)
        memory.seek(0)
        memory.truncate()
        json.dump(vars(cloud), memory)
    print(stdout)
    print(stderr, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
