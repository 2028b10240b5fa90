"""The engine of a Kubernetes cluster with JobSet and Kueue: writes manifests, and does not apply them yet.

    exit status 75, or a lost node     the JobSet is restarted, without limit
    any other failure                  the JobSet fails
    its time limit                     its pods are signalled; it is restarted, at most `restarts` times

Pods receive SIGTERM where other engines send SIGUSR1: Kubernetes has no other signal. Agents save and stop on both.
"""

import json
import math
import re
import signal
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from headway.cluster.engines.engine import (
    REQUEUE,
    Engine,
    JobStatus,
    LaunchRequest,
    Machine,
    check_limit,
    did_you_mean,
)
from headway.cluster.engines.scripts import command_with_setup
from headway.errors import EngineError, UsageError

SITE = {
    "image": "container image with headway in it",
    "claim": "volume claim that all pods share",
    "mount": "where it is mounted; must contain the job's folder",
    "queue": "Kueue's local queue",
    "priority": "Kueue's priority class",
    "topology": "level of Kueue's topology that all pods must share",
    "namespace": "namespace of all objects",
    "secret": "the Secret with the secrets, by variable name",
    "service_account": "service account of the pods",
    "gpu_resource": "resource name of GPUs (nvidia.com/gpu)",
    "restarts": "restarts for reasons other than exit status 75 (10)",
}
"""Settings of a cluster and what they mean."""
LONGEST_NAME = 40
"""Pods are named after the job, and pod names are labels of at most 63 characters."""
PODS = "machine"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
HOST = "kubernetes.io/hostname"
POD_RULES = [
    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"containerName": PODS, "operator": "NotIn", "values": [REQUEUE]}},
]
"""Which pod failures are the command's own; the first matching rule counts."""
JOB_RULES = [
    {"name": name, "action": action, "onJobFailureReasons": [reason]}
    for name, action, reason in (
        ("failed", "FailJobSet", "PodFailurePolicy"),
        ("requeued", "RestartJobSetAndIgnoreMaxRestarts", "BackoffLimitExceeded"),
        ("out_of_time", "RestartJobSet", "DeadlineExceeded"),
    )
]
"""What follows: the command's own failures are final, others restart the JobSet."""


class KubernetesEngine(Engine):
    """Writes JobSets; whatever needs the cluster raises EngineError."""

    name: ClassVar[str] = "kubernetes"

    def probe(self) -> None:
        """Nothing to check: no cluster is contacted."""

    def describe(self, request: LaunchRequest) -> str:
        """The JobSet as JSON for `kubectl apply -f -`; a list of them for an array."""
        manifests = job_sets(request)
        array = {"apiVersion": "v1", "kind": "List", "items": manifests}
        return json.dumps(manifests[0] if request.array is None else array, indent=2) + "\n"

    def inventory(self) -> list[Machine]:
        """Not supported yet."""
        raise _unsupported("cannot list nodes")

    def launch(self, request: LaunchRequest) -> str:
        """Not supported yet; a bad request is still refused as such."""
        job_sets(request)
        raise _unsupported("nothing was submitted")

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """Not supported yet."""
        if jobs:
            raise _unsupported("cannot query jobs")
        return {}

    def signal(self, job: str, number: signal.Signals) -> None:  # noqa: ARG002
        """Not supported yet."""
        raise _unsupported("no signal was sent")

    def logs(self, job: str) -> list[Path]:  # noqa: ARG002
        """Not supported yet."""
        raise _unsupported("cannot find logs")

    def release(self, job: str) -> bool:  # noqa: ARG002
        """Not supported yet."""
        raise _unsupported("nothing was released")

    def cancel(self, job: str) -> None:  # noqa: ARG002
        """Not supported yet."""
        raise _unsupported("nothing was cancelled")


def _unsupported(what: str) -> EngineError:
    return EngineError(
        f"{what}: the Kubernetes engine writes JobSets and does not apply them yet",
        hint="headway submit --dry-run prints the manifest for kubectl apply",
    )


def job_sets(request: LaunchRequest) -> list[dict[str, Any]]:
    """The manifests: one JobSet, or one per array task. Pure: no cluster is contacted."""
    site = _site(request)
    check_limit(request, request.limit_s)
    if request.at_once is not None:
        raise UsageError(
            f"job {request.name}: Kubernetes cannot limit the tasks at a time", hint="limit the queue in Kueue"
        )
    if request.array is None:
        return [_job_set(request, site, _dns(request.name), {})]
    return [
        _job_set(request, site, _dns(f"{request.name}-{index}"), {"HEADWAY_ARRAY_INDEX": str(index)})
        for index in range(request.array)
    ]


def _site(request: LaunchRequest) -> dict[str, str]:
    """The cluster's settings; UsageError for unknown, missing or invalid ones."""
    for key in request.site:
        if key not in SITE:
            raise UsageError(f"the Kubernetes engine has no setting {key!r}", hint=did_you_mean(key, SITE))
    missing = [key for key in ("image", "claim", "mount") if not request.site.get(key)]
    if missing:
        raise UsageError(
            f"the Kubernetes engine needs `{missing[0]}`: {SITE[missing[0]]}", hint="set it in engines.toml"
        )
    mount = PurePosixPath(request.site["mount"])
    if not mount.is_absolute() or not PurePosixPath(request.folder).is_relative_to(mount):
        raise UsageError(
            f"the job's folder {request.folder} is not in {mount}, where pods mount the shared volume",
            hint="choose a folder in it, or change `mount`",
        )
    if not request.site.get("restarts", "10").isdecimal():
        raise UsageError(f"restarts is {request.site['restarts']!r}", hint="expected a whole number")
    return dict(request.site)


def _dns(name: str) -> str:
    """A job's name as a DNS label."""
    label = re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-")
    if not label or len(label) > LONGEST_NAME:
        raise UsageError(f"{name!r} is too long for Kubernetes", hint=f"at most {LONGEST_NAME} characters")
    return label if label[0].isalpha() else f"j-{label}"


def _job_set(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": site.get("queue"), "kueue.x-k8s.io/priority-class": site.get("priority")}
    metadata = {"name": name, "namespace": site.get("namespace"), "labels": _set_only(labels)}
    # Signal pods so early that their grace period ends at the time limit.
    deadline_s = None if request.limit_s is None else max(1, math.floor(request.limit_s - request.grace_s))
    job = {
        "parallelism": request.machines,
        "completions": request.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": deadline_s,
        "podFailurePolicy": {"rules": POD_RULES},
        "template": _pod(request, site, name, own),
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": int(site.get("restarts", "10")), "rules": JOB_RULES},
        "replicatedJobs": [{"name": PODS, "replicas": 1, "template": {"spec": _set_only(job)}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _set_only(metadata), "spec": spec}


def _pod(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> dict[str, Any]:
    topology = {"kueue.x-k8s.io/podset-required-topology": site.get("topology")}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(request.grace_s),
        "serviceAccountName": site.get("service_account"),
        "affinity": _affinity(request, name),
        "containers": [_container(request, site, name, own)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": site["claim"]}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return _set_only({"metadata": _set_only({"annotations": _set_only(topology)}), "spec": _set_only(spec)})


def _affinity(request: LaunchRequest, name: str) -> dict[str, Any]:
    """One pod per machine, and none on those to avoid."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    job_pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    affinity: dict[str, Any] = {"podAntiAffinity": {required: [{"labelSelector": job_pods, "topologyKey": HOST}]}}
    if request.avoid:
        terms = [{"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": list(request.avoid)}]}]
        affinity["nodeAffinity"] = {required: {"nodeSelectorTerms": terms}}
    return affinity


def _container(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> dict[str, Any]:
    limits = {"cpu": str(request.cpus), "memory": str(request.memory_bytes) if request.memory_bytes else None}
    if request.gpus:
        limits[site.get("gpu_resource", "nvidia.com/gpu")] = str(request.gpus)
    return {
        "name": PODS,
        "image": site["image"],
        "command": [_literal(word) for word in command_with_setup(request)],
        "workingDir": str(request.folder),
        "env": _environment(request, site, name, own),
        "resources": {"limits": _set_only(limits)},
        "volumeMounts": [{"name": "shared", "mountPath": site["mount"]}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _environment(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> list[dict[str, Any]]:
    """Variables with their values; secrets as references to the Secret."""
    hosts = ",".join(f"{name}-{PODS}-0-{number}.{name}" for number in range(request.machines))
    plain = {**request.environment, "HEADWAY_MACHINES": hosts, **own}
    secret = site.get("secret", name)
    return [
        *({"name": variable, "value": _literal(value)} for variable, value in sorted(plain.items())),
        {"name": "HEADWAY_MACHINE", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key in request.secrets),
    ]


def _literal(text: str) -> str:
    """Escape $(NAME), which Kubernetes would expand."""
    return text.replace("$(", "$$(")


def _set_only(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are set."""
    return {key: value for key, value in fields.items() if value not in (None, {})}
