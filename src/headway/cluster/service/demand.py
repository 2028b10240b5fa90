"""What a request of an engine asks of the scheduler: pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from headway.cluster.engines.engine import LaunchRequest, did_you_mean
from headway.cluster.scheduler.jobs import KINDS, Job
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.service.live_state import LiveState
from headway.cluster.service.secret_files import names_of_files
from headway.errors import UsageError

SITE = {
    "tenant": "the name of a tenant",
    "user": "who submits it",
    "priority": "a whole number; higher goes first",
    "preemptible": "yes or no: whether it may be stopped and restarted",
    "save_every_s": "seconds between checkpoints",
    "restart_s": "seconds that a restart takes",
    "min_run_s": "seconds before it may be preempted",
    "within": "a network level whose domains it must not span",
    "kind": ", ".join(KINDS),
    "sizes": "GPUs and relative speeds, the smallest first, such as 2:1,4:1.9",
    "spread": "yes or no: whether a job with sizes may be on several nodes, with any number of GPUs on each",
    "after": "jobs that must be over first, with commas: JOB (has succeeded) or JOB:any",
    "secret_files": "secrets to hand over as files, with commas",
    "code": "the SHA-256 of code that was uploaded",
}
"""Settings that only this engine has."""
MOST_PRIORITY = 1_000_000


def job_of(request: LaunchRequest, name: str, submit_s: float, tenants: list[str]) -> Job:
    """Return what the scheduler is told of a request; UsageError for settings that it does not understand."""
    site = request.site
    for key in site:
        if key not in SITE:
            raise UsageError(f"the service has no setting {key!r}", hint=did_you_mean(key, SITE))
    if request.spares:
        raise UsageError(
            f"job {request.name} sets spares={request.spares}; the service has no spare machines",
            hint="leave them out: after --give-up-after, the service starts the job on other nodes",
        )
    filed = [name for name in names_of_files(request) if name not in request.secrets]
    if filed:
        raise UsageError(f"job {request.name}: secret_files has {filed[0]}, which is none of its secrets")
    preemptible, spread = _flag(request, "preemptible"), _flag(request, "spread")
    return Job(
        name,
        tenant_of(request, tenants),
        request.machines * request.gpus,
        submit_s=submit_s,
        priority=_priority(request),
        preemptible=preemptible,
        limit_s=math.inf if request.limit_s is None else request.limit_s,
        save_every_s=_number(request, "save_every_s", 1800.0),
        restart_s=_number(request, "restart_s", 120.0),
        min_run_s=_number(request, "min_run_s", 0.0),
        within=site.get("within"),
        user=site.get("user", ""),
        kind=site.get("kind", "batch" if request.array is None else "array"),
        sizes=_sizes(request, preemptible=preemptible, spread=spread),
        machines=0 if spread else request.machines,
        cpus=float(request.cpus),
        memory_bytes=float(request.memory_bytes or 0),
        avoid=tuple(request.avoid),
    )


def _sizes(request: LaunchRequest, *, preemptible: bool, spread: bool) -> tuple[tuple[int, float], ...]:
    """The scaling curve of an elastic job: it is resized by a save, a stop and a start."""
    text = request.site.get("sizes")
    if text is None:
        if spread:
            raise UsageError(f"job {request.name} has spread=yes, but no sizes", hint=SITE["sizes"])
        return ()
    if request.machines != 1:
        raise UsageError(
            f"job {request.name} has sizes and {request.machines} machines",
            hint="one machine; with --spread the GPUs of a size may be on several",
        )
    if not preemptible:
        raise UsageError(f"job {request.name} has sizes; it must be preemptible", hint="--preemptible")
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(gpus), float(speed)) for gpus, speed in pairs)
    except ValueError:
        raise UsageError(f"job {request.name}: sizes are {text!r}", hint=SITE["sizes"]) from None


def _flag(request: LaunchRequest, key: str) -> bool:
    text = request.site.get(key, "no")
    if text not in ("yes", "no"):
        raise UsageError(f"job {request.name}: {key} is {text!r}", hint="yes or no")
    return text == "yes"


def tenant_of(request: LaunchRequest, tenants: list[str]) -> str:
    """Return the tenant of a request; UsageError if it names none and there are several."""
    if "tenant" not in request.site and len(tenants) != 1:
        hint = f"--tenant, or tenant in a job's file: one of {', '.join(tenants)}"
        raise UsageError(f"job {request.name} names no tenant", hint=hint)
    return request.site.get("tenant", tenants[0])


def _priority(request: LaunchRequest) -> int:
    text = request.site.get("priority", "0")
    try:
        priority = int(text)
    except ValueError:
        priority = MOST_PRIORITY + 1
    if abs(priority) > MOST_PRIORITY:
        raise UsageError(
            f"job {request.name}: priority is {text!r}", hint=f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        )
    return priority


def _number(request: LaunchRequest, key: str, default: float) -> float:
    try:
        return float(request.site.get(key, default))
    except ValueError:
        raise UsageError(f"job {request.name}: {key} is {request.site[key]!r}", hint=SITE[key]) from None


class EmptyCluster:
    """Nodes, tenants and policy of a cluster without jobs; UsageError if they do not fit together."""

    def __init__(self, values: Mapping[str, Any], *, whole: bool = True) -> None:
        """Guarantees must fit into the `whole` cluster; one to which nodes may still come need not hold them."""
        self.values: dict[str, Any] = json.loads(json.dumps(values))
        self.tenants = [tenant["name"] for tenant in values["tenants"]]
        self._empty = _empty_cluster(self.values)
        if whole:
            self._empty.tenants.check_guarantees(self._empty.gpus)
        self._usable: dict[str, ClusterSnapshot] = {}
        """The cluster as each tenant sees it whose jobs were checked: some nodes may refuse them."""

    def check_job(self, job: Job) -> None:
        """Raise UsageError, with the nearest that could run as its hint, for a job that can never run here."""
        if not self.values["nodes"]:
            raise UsageError(
                f"job {job.name} cannot run: no node has joined yet",
                hint="headway node token makes a token for one, headway node join uses it there",
            )
        self._usable_by(job.tenant).check_job(job)
        if job.avoid:
            self._check_without(job)

    def _check_without(self, job: Job) -> None:
        """Raise UsageError for a job that cannot run on the nodes that it does not avoid."""
        able = [node for node in self.values["nodes"] if job.tenant in node.get("tenants", [job.tenant])]
        left = [node for node in able if node["name"] not in job.avoid]
        try:
            if not left:
                raise UsageError("it avoids every node")
            _empty_cluster(self.values | {"nodes": left}).check_job(job)
        except UsageError as error:
            raise UsageError(
                f"job {job.name} cannot run without {', '.join(job.avoid)}: {error.message}",
                hint="avoid fewer nodes" + (f", or {error.hint}" if error.hint else ""),
            ) from None

    def _usable_by(self, tenant: str) -> ClusterSnapshot:
        if tenant not in self.tenants:  # whose names anybody may make up
            return self._empty
        if tenant not in self._usable:  # once: there may be ten thousand nodes
            nodes = [node for node in self.values["nodes"] if tenant in node.get("tenants", [tenant])]
            some = len(nodes) < len(self.values["nodes"])
            self._usable[tenant] = _empty_cluster(self.values | {"nodes": nodes}) if some else self._empty
        return self._usable[tenant]


def _empty_cluster(values: Mapping[str, Any]) -> ClusterSnapshot:
    state = LiveState()
    state.apply({"at": 0.0, "cluster": values})
    return state.snapshot
