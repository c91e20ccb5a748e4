"""Steps that all backends share: checks, the bucket, files, results."""

from tpu_embedding.paths import local_path
from tpu_embedding.tools.launch.programs import read_script
from tpu_embedding.tools.launch.settings import UNTIL_DELETED, Launch
from tpu_embedding.tools.launch.steps import (
    Command,
    Do,
    Expected,
    Probe,
    Require,
    Step,
    gcloud,
)


def check_fit(launch: Launch) -> Step:
    """Returns the step that compiles the config for the slices, on this machine."""
    settings = [word for setting in launch.settings for word in ("--set", setting)]
    argv = ["tpu-embedding", "compile", launch.config, "--topology", launch.topology]
    argv += ["--slices", str(launch.slices), *settings]
    return Do("check that the config fits the slices", Command(tuple(argv)))


def check_zone(launch: Launch) -> Step:
    """Returns the step that asks if the zone has the machines."""
    machine_type = launch.facts.machine_type
    if machine_type:
        offer = machine_type
        group = ("compute", "machine-types")
        others = f"gcloud compute machine-types list --filter=name={machine_type}"
    else:
        offer = launch.facts.accelerator_type
        group = ("compute", "tpus", "accelerator-types")
        others = "the page cloud.google.com/tpu/docs/regions-zones"
    command = gcloud(
        *group,
        "describe",
        offer,
        project=launch.project,
        zone=launch.zone,
        format="json",
    )
    return Require(
        f"check that the zone offers {offer}",
        Probe(f"{offer} in zone {launch.zone}", command),
        f"choose another zone; {others} lists them",
    )


def check_account(launch: Launch) -> Step:
    """Returns the step that asks if the service account exists."""
    account = launch.service_account
    command = gcloud(
        "iam",
        "service-accounts",
        "describe",
        account,
        project=launch.project,
        format="json",
    )
    return Require(
        "check that the service account exists",
        Probe(f"service account {account}", command),
        "run gcloud iam service-accounts create, and grant it the guide's roles",
    )


def create_bucket(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that create the bucket, and admit the machines to it.

    A hierarchical namespace lets a checkpoint be renamed at once.
    """
    url, project = f"gs://{launch.bucket}", launch.project
    describe = gcloud(
        "storage", "buckets", "describe", url, project=project, raw=True, format="json"
    )
    return (
        Do(
            "create the bucket",
            gcloud(
                "storage",
                "buckets",
                "create",
                url,
                project=project,
                location=launch.region,
                uniform_bucket_level_access=True,
                enable_hierarchical_namespace=True,
            ),
            "missing",
            Probe(
                f"bucket {launch.bucket}",
                describe,
                (Expected("hierarchicalNamespace.enabled", "true"),),
            ),
        ),
        Do(
            "admit the machines to the bucket",
            gcloud(
                "storage",
                "buckets",
                "add-iam-policy-binding",
                url,
                project=project,
                member=f"serviceAccount:{launch.service_account}",
                role="roles/storage.objectUser",
            ),
        ),
    )


def upload_files(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that copy a wheel and a config of the user's own."""
    return tuple(
        Do(
            "copy a file to the bucket",
            gcloud(
                "storage",
                "cp",
                str(local_path(path)),
                f"{launch.folder_url}/launch/",
                project=launch.project,
            ),
        )
        for path in launch.own_files
    )


def upload_scripts(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that copy the scripts for machines to the bucket."""
    steps = []
    for name in ("setup_host.sh", "run_host.sh", "stop_host.sh"):
        url = f"{launch.folder_url}/launch/{name}"
        copy = gcloud("storage", "cp", "-", url, project=launch.project)
        command = Command(copy.argv, stdin=read_script(name))
        steps.append(Do("copy a script to the bucket", command))
    return tuple(steps)


def fetch_results(launch: Launch, target: str) -> tuple[Step, ...]:
    """Returns the step that copies the results from the bucket.

    Args:
      launch: the launch.
      target: local folder.
    """
    return (
        Do(
            "copy the results",
            gcloud(
                "storage",
                "rsync",
                f"{launch.folder_url}/results",
                target,
                project=launch.project,
                recursive=True,
            ),
        ),
    )


def what_deletes(launch: Launch) -> str:
    """Returns a sentence that says what ends the cost of the machines."""
    by_hand = "tpu-embedding launch delete"
    if launch.lifetime == UNTIL_DELETED:
        return (
            f"Nothing but {by_hand} deletes the machines; they cost money until then."
        )
    if launch.backend == "gke" and launch.capacity != "flex_start":
        return (
            f"Each start of the job ends after {launch.lifetime}. The cluster's "
            "autoscaler deletes nodes about 10 minutes after their last job, or after "
            f"their creation if none starts. The cluster stays until {by_hand} "
            "--with-cluster."
        )
    return (
        f"Google Cloud deletes each machine {launch.lifetime} after its start; "
        f"{by_hand} does it at once."
    )
