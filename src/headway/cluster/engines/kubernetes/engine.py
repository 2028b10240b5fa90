"""The engine of a Kubernetes cluster with JobSet and Kueue: writes what would be applied, and does not apply it yet.

    exit 75, or a node that was lost     the JobSet is started again, as often as it happens
    any other failure                    the JobSet fails
    its limit                            its pods are told; it is started again, `restarts` times at most

Pods hear SIGTERM where other engines send SIGUSR1: Kubernetes has no other word. Agents take both for "save and stop".
"""

import json
import math
import re
import signal
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from headway.cluster.engines.engine import REQUEUE, Engine, JobStatus, LaunchRequest, Machine
from headway.errors import EngineError, UsageError

__all__ = ["KubernetesEngine", "job_sets"]

SITE = {
    "image": "the container's image, with headway in it",
    "claim": "a volume claim that all pods share",
    "mount": "where it is mounted; the job's folder lies below",
    "queue": "Kueue's local queue",
    "priority": "Kueue's priority class",
    "topology": "a level of Kueue's topology in which all pods must lie",
    "namespace": "of everything",
    "secret": "the Secret that holds the secrets, each under its variable's name",
    "service_account": "of the pods",
    "gpu_resource": "what GPUs are called (nvidia.com/gpu)",
    "restarts": "how often it is started again for other reasons than its own wish (10)",
}
"""What can be set for a cluster, and what it means."""
LONGEST_NAME = 40
"""Pods are named after the job, and their names are labels of 63 letters at most."""
PODS = "machine"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
HOST = "kubernetes.io/hostname"


class KubernetesEngine(Engine):
    """Writes JobSets; whatever would need the cluster says that it comes later."""

    name: ClassVar[str] = "kubernetes"

    def describe(self, request: LaunchRequest) -> str:
        """The JobSet, as JSON that `kubectl apply -f -` takes; a list of them for an array."""
        made = job_sets(request)
        whole = made[0] if request.array is None else {"apiVersion": "v1", "kind": "List", "items": made}
        return json.dumps(whole, indent=2) + "\n"

    def inventory(self) -> list[Machine]:
        """Comes later."""
        raise _later("nodes cannot be listed")

    def launch(self, request: LaunchRequest) -> str:
        """Comes later; what is wrong with the request is told even so."""
        job_sets(request)
        raise _later("nothing was submitted")

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """Comes later."""
        if jobs:
            raise _later("jobs cannot be asked about")
        return {}

    def signal(self, job: str, number: signal.Signals) -> None:  # noqa: ARG002
        """Comes later."""
        raise _later("no signal was sent")

    def logs(self, job: str) -> list[Path]:  # noqa: ARG002
        """Comes later."""
        raise _later("logs cannot be found")

    def cancel(self, job: str) -> None:  # noqa: ARG002
        """Comes later."""
        raise _later("nothing was cancelled")


def _later(what: str) -> EngineError:
    return EngineError(
        f"{what}: the Kubernetes engine writes JobSets and does not apply them yet",
        hint="with --dry-run, headway submit prints what would be applied",
    )


def job_sets(request: LaunchRequest) -> list[dict[str, Any]]:
    """What would be applied: one JobSet, or one for each copy of an array. Pure: no cluster is asked."""
    site = _site(request)
    if request.at_once is not None:
        raise UsageError(
            f"job {request.name}: Kubernetes has no limit on copies at a time", hint="a queue of Kueue's has one"
        )
    if request.array is None:
        return [_job_set(request, site, _dns(request.name), {})]
    return [
        _job_set(request, site, _dns(f"{request.name}-{index}"), {"HEADWAY_ARRAY_INDEX": str(index)})
        for index in range(request.array)
    ]


def _site(request: LaunchRequest) -> dict[str, str]:
    """The settings of the cluster, all known and none missing."""
    for key in request.site:
        if key not in SITE:
            raise UsageError(f"the Kubernetes engine has no setting {key!r}", hint=f"it knows {', '.join(SITE)}")
    missing = [key for key in ("image", "claim", "mount") if not request.site.get(key)]
    if missing:
        raise UsageError(f"the Kubernetes engine needs `{missing[0]}`: {SITE[missing[0]]}", hint="in engines.toml")
    mount = PurePosixPath(request.site["mount"])
    if not mount.is_absolute() or not PurePosixPath(request.folder).is_relative_to(mount):
        raise UsageError(
            f"the job's folder {request.folder} does not lie in {mount}, where pods have the shared volume",
            hint="choose a folder in it, or set `mount`",
        )
    if not request.site.get("restarts", "10").isdecimal():
        raise UsageError(f"restarts is {request.site['restarts']!r}", hint="a whole number")
    return dict(request.site)


def _dns(name: str) -> str:
    """A job's name as Kubernetes allows it."""
    made = re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-")
    if not made or len(made) > LONGEST_NAME:
        raise UsageError(f"{name!r} is too long for Kubernetes", hint=f"at most {LONGEST_NAME} letters")
    return made if made[0].isalpha() else f"j-{made}"


def _job_set(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": site.get("queue"), "kueue.x-k8s.io/priority-class": site.get("priority")}
    metadata = {"name": name, "namespace": site.get("namespace"), "labels": _given(labels)}
    job = {
        "parallelism": request.machines,
        "completions": request.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": _deadline(request),
        "podFailurePolicy": {"rules": _pod_rules()},
        "template": _pod(request, site, name, own),
    }
    spec = {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": int(site.get("restarts", "10")), "rules": _job_rules()},
        "replicatedJobs": [{"name": PODS, "replicas": 1, "template": {"spec": _given(job)}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _given(metadata), "spec": spec}


def _deadline(request: LaunchRequest) -> int | None:
    """Pods are told so long before the limit that they have their grace until then."""
    return None if request.limit_s is None else max(1, math.floor(request.limit_s - request.grace_s))


def _pod_rules() -> list[dict[str, Any]]:
    """Which of the pods' ends are the command's own mistake; the first rule that fits counts."""
    return [
        {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": PODS, "operator": "NotIn", "values": [REQUEUE]}},
    ]


def _job_rules() -> list[dict[str, Any]]:
    """What follows: what was a mistake is not tried again, what was none does not count."""
    rules = {
        "failed": ("FailJobSet", "PodFailurePolicy"),
        "requeued": ("RestartJobSetAndIgnoreMaxRestarts", "BackoffLimitExceeded"),
        "out_of_time": ("RestartJobSet", "DeadlineExceeded"),
    }
    return [{"name": name, "action": act, "onJobFailureReasons": [reason]} for name, (act, reason) in rules.items()]


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
    return _given({"metadata": _given({"annotations": _given(topology)}), "spec": _given(spec)})


def _affinity(request: LaunchRequest, name: str) -> dict[str, Any]:
    """One pod a machine, and none on those to avoid."""
    ours = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": ours, "topologyKey": HOST}]}
    if not request.avoid:
        return {"podAntiAffinity": apart}
    away = [{"matchExpressions": [{"key": HOST, "operator": "NotIn", "values": list(request.avoid)}]}]
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": away}}
    return {"podAntiAffinity": apart, "nodeAffinity": node}


def _container(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> dict[str, Any]:
    words = list(request.command)
    if request.setup:
        words = ["bash", "-c", "\n".join(["set -e", *request.setup, "set +e", 'exec -- "$@"']), "bash", *words]
    limits = {"cpu": str(request.cpus), "memory": str(request.memory_bytes) if request.memory_bytes else None}
    if request.gpus:
        limits[site.get("gpu_resource", "nvidia.com/gpu")] = str(request.gpus)
    return {
        "name": PODS,
        "image": site["image"],
        "command": [_literal(word) for word in words],
        "workingDir": str(request.folder),
        "env": _environment(request, site, name, own),
        "resources": {"limits": _given(limits)},
        "volumeMounts": [{"name": "shared", "mountPath": site["mount"]}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _environment(request: LaunchRequest, site: dict[str, str], name: str, own: dict[str, str]) -> list[dict[str, Any]]:
    """Variables with their values; of secrets, where the cluster finds them."""
    hosts = ",".join(f"{name}-{PODS}-0-{number}.{name}" for number in range(request.machines))
    plain = {**request.environment, "HEADWAY_MACHINES": hosts, **own}
    secret = site.get("secret", name)
    return [
        *({"name": variable, "value": _literal(value)} for variable, value in sorted(plain.items())),
        {"name": "HEADWAY_MACHINE", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        *({"name": one, "valueFrom": {"secretKeyRef": {"name": secret, "key": one}}} for one in request.secrets),
    ]


def _literal(text: str) -> str:
    """Kubernetes puts variables in for $(NAME), unless the dollar stands twice."""
    return text.replace("$(", "$$(")


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what is not set."""
    return {key: value for key, value in fields.items() if value not in (None, {})}
