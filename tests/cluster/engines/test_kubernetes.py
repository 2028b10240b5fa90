"""JobSets are valid against the schema of the real CRD, and hold what was requested."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.kubernetes.engine import SITE, KubernetesEngine, job_sets
from headway.errors import EngineError, UsageError

SCHEMA = json.loads((Path(__file__).parent / "jobset-v1alpha2.json").read_text())
"""That of JobSet 0.12.0, without descriptions and unused parts."""
CLUSTER = {"image": "example.org/headway:1", "claim": "shared", "mount": "/shared"}
EVERYTHING = LaunchRequest(
    "My_run.1",
    ("headway", "agent", "--run", "a b", "$(HOME)"),
    Path("/shared/runs/a"),
    machines=4,
    gpus=8,
    cpus=64,
    memory_bytes=2**40,
    limit_s=3600,
    grace_s=120.5,
    environment={"PLAIN": "$(x) y"},
    secrets=("HF_TOKEN",),
    setup=("module load x",),
    avoid=("node-7",),
    site={**dict.fromkeys(SITE, "some"), **CLUSTER, "restarts": "3"},
)
SMALL = LaunchRequest("small", ("true",), Path("/shared"), site=CLUSTER)


def check(job_set: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(SCHEMA["schema"]).validate(job_set)


@pytest.mark.parametrize("request_", [EVERYTHING, SMALL], ids=["everything", "small"])
def test_manifest_is_a_valid_jobset(request_: LaunchRequest) -> None:
    job_set = json.loads(KubernetesEngine().describe(request_))
    check(job_set)
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "restartPolicies"), "Never"),
        (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "4"),
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "gpus"), 8),
    ],
)
def test_schema_check_finds_invalid_fields(path: tuple[Any, ...], value: Any) -> None:
    broken = copy.deepcopy(job_sets(EVERYTHING)[0])
    parent: Any = broken
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(broken)


def pod_of(job_set: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


def test_one_pod_per_machine_with_the_requested_resources() -> None:
    (job_set,) = job_sets(EVERYTHING)
    job, pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"], pod_of(job_set)
    assert job_set["metadata"]["name"] == "my-run-1"
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "some"
    assert (job["parallelism"], job["completions"], job["activeDeadlineSeconds"]) == (4, 4, 3479)
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 121
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": str(2**40), "some": "8"}
    assert container["command"][:2] == ["bash", "-c"]
    assert container["command"][4:] == ["headway", "agent", "--run", "a b", "$$(HOME)"]
    assert "node-7" in json.dumps(pod["affinity"]["nodeAffinity"])


def test_secrets_are_references_and_values_are_escaped() -> None:
    (container,) = pod_of(job_sets(EVERYTHING)[0])["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["HF_TOKEN"] == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "some", "key": "HF_TOKEN"}},
    }
    assert variables["PLAIN"]["value"] == "$$(x) y", "Kubernetes turns it into $(x) y"
    hosts = variables["HEADWAY_MACHINES"]["value"].split(",")
    assert hosts[3] == "my-run-1-machine-0-3.my-run-1"
    assert len(hosts) == 4


def test_array_has_one_jobset_per_task() -> None:
    request = LaunchRequest("many", ("true",), Path("/shared"), array=3, site=CLUSTER)
    manifest = json.loads(KubernetesEngine().describe(request))
    assert manifest["kind"] == "List"
    assert [item["metadata"]["name"] for item in manifest["items"]] == ["many-0", "many-1", "many-2"]
    for number, item in enumerate(manifest["items"]):
        check(item)
        variables = {entry["name"]: entry.get("value") for entry in pod_of(item)["containers"][0]["env"]}
        assert variables["HEADWAY_ARRAY_INDEX"] == str(number)


@pytest.mark.parametrize(
    ("site", "error"),
    [
        ({}, "needs `image`"),
        ({**CLUSTER, "mount": "/other"}, "is not in /other"),
        ({**CLUSTER, "partition": "gpu"}, "no setting 'partition'"),
        ({**CLUSTER, "restarts": "many"}, "restarts is 'many'"),
    ],
)
def test_wrong_settings_are_reported(site: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        KubernetesEngine().describe(LaunchRequest("small", ("true",), Path("/shared"), site=site))


def test_name_too_long_for_kubernetes_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        job_sets(LaunchRequest("a" * 41, ("true",), Path("/shared"), site=CLUSTER))


def test_applying_is_not_supported_yet() -> None:
    engine = KubernetesEngine()
    for act in (engine.inventory, lambda: engine.launch(SMALL), lambda: engine.cancel("small")):
        with pytest.raises(EngineError, match="does not apply them yet"):
            act()
