"""What happened on a cluster, folded from the record of its service: spans of jobs, GPU-seconds of tenants, decisions.

The lines are those of `headway.cluster.service.live_state`. Nothing is decided again: each line becomes what a page
shows of it. Lines of unknown kinds are listed with their name.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.cluster.service.grants import LiveDecision, decode

MOST_ENTRIES = 2000
"""Of the list of decisions: the newest."""
MOST_JOBS = 5000
"""Whose spans are kept; of jobs that are over, the newest."""
_ACTIVE = ("starting", "running", "ending")
_VERBS = {
    "start": "starts",
    "stop": "is preempted",
    "move": "moves",
    "resize": "changes size",
    "reserve": "has GPUs reserved",
}


@dataclass
class Span:
    """A stretch of a job's life in one state."""

    state: str
    """waiting, held, starting, running or ending."""
    begin_s: float
    end_s: float | None = None
    gpus: int = 0
    nodes: tuple[str, ...] = ()


@dataclass
class JobSpans:
    """A job as the scheduler has seen it."""

    job: str
    tenant: str
    gpus: int
    spans: list[Span] = field(default_factory=list)
    over: bool = False

    @property
    def last(self) -> Span:
        """The newest span."""
        return self.spans[-1]


@dataclass(frozen=True)
class Entry:
    """Something that happened, in words."""

    seq: int
    at_s: float
    kind: str
    job: str | None
    tenant: str | None
    text: str


class ClusterRecord:
    """The fold; `apply` takes the next line."""

    def __init__(self) -> None:
        self.seen = 0
        self.now_s = 0.0
        self.policy = ""
        self.tenants: list[Mapping[str, Any]] = []
        self.jobs: dict[str, JobSpans] = {}
        self.entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self._used: dict[str, float] = {}
        self._over: deque[str] = deque()
        self._takers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "cluster": self._take_cluster,
            "job": self._take_job,
            "decided": self._take_decided,
            "running": self._take_running,
            "stopping": self._take_stopping,
            "exited": self._take_exited,
            "hold": self._take_hold,
            "unhold": self._take_unhold,
            "node": self._take_node,
        }

    def apply(self, line: Mapping[str, Any]) -> None:
        """Take the next line of the record."""
        self.seen += 1
        self.now_s = max(self.now_s, float(line["at"]))
        kind = next((key for key in line if key != "at"), "")
        if kind in self._takers:
            self._takers[kind](line)
        else:
            about = line.get(kind)
            self._note(kind, about if isinstance(about, str) and about in self.jobs else None, kind)

    def gpu_seconds(self) -> dict[str, float]:
        """Return the GPU-seconds that each tenant's jobs have held GPUs for."""
        used = dict(self._used)
        for job in self.jobs.values():
            if not job.over and job.last.state in _ACTIVE:
                used[job.tenant] = used.get(job.tenant, 0.0) + job.last.gpus * (self.now_s - job.last.begin_s)
        return used

    # -- one method per kind of line

    def _take_cluster(self, line: Mapping[str, Any]) -> None:
        cluster = line["cluster"]
        self.policy, self.tenants = cluster["policy"], cluster["tenants"]
        gpus = sum(len(node["gpus"]) for node in cluster["nodes"])
        self._note(
            "cluster", None, f"the cluster has {len(cluster['nodes']):,} nodes with {gpus:,} GPUs, policy {self.policy}"
        )

    def _take_job(self, line: Mapping[str, Any]) -> None:
        fields = line["job"]
        job = JobSpans(fields["name"], fields["tenant"], int(fields["gpus"]))
        job.spans.append(Span("waiting", self.now_s))
        self.jobs[job.job] = job
        self._note("submit", job.job, f"is submitted by {job.tenant}, for {job.gpus:,} GPU{'s' * (job.gpus != 1)}")

    def _take_decided(self, line: Mapping[str, Any]) -> None:
        for fields in line["decided"]:
            decision = decode(fields)
            if decision.kind == "start":
                self._enter(decision.job, "starting", decision)
            elif decision.kind in ("stop", "move"):
                self._enter(decision.job, "ending")
            nodes = [node for node, _ in decision.grant]
            where = f" on {', '.join(nodes[:4])}{f' and {len(nodes) - 4:,} more' * (len(nodes) > 4)}" if nodes else ""
            text = f"{_VERBS.get(decision.kind, decision.kind)}{where}: {decision.reason.sentence}"
            self._note(decision.kind, decision.job, text)

    def _take_running(self, line: Mapping[str, Any]) -> None:
        self._enter(line["running"], "running")
        self._note("running", line["running"], "runs: its nodes have confirmed it")

    def _take_stopping(self, line: Mapping[str, Any]) -> None:
        self._enter(line["stopping"], "ending")
        self._note("stopping", line["stopping"], "is stopped by a user")

    def _take_exited(self, line: Mapping[str, Any]) -> None:
        name, again = line["exited"], bool(line.get("again"))
        text = "exits"
        if again:
            text = f"exits {'after' if line.get('saved') else 'without'} a save, and waits again"
            self._enter(name, "waiting")
        self._note("exit", name, text)
        if not again:
            self._end(name)

    def _take_hold(self, line: Mapping[str, Any]) -> None:
        self._enter(line["hold"], "held")
        self._note("hold", line["hold"], "is held by a user")

    def _take_unhold(self, line: Mapping[str, Any]) -> None:
        self._enter(line["unhold"], "waiting")
        self._note("release", line["unhold"], "is released by a user")

    def _take_node(self, line: Mapping[str, Any]) -> None:
        self._note("node", None, f"node {line['node']} is {line['state']}")

    # -- spans

    def _enter(self, name: str, state: str, decision: LiveDecision | None = None) -> None:
        """Begin the next span of a job; one that holds GPUs takes them over from the one before."""
        job = self.jobs.get(name)
        if job is None or job.over or job.last.state == state:
            return
        before = job.last
        self._close(job)
        gpus, nodes = (before.gpus, before.nodes) if state in _ACTIVE else (0, ())
        if decision is not None:
            gpus = sum(len(ids) for _, ids in decision.grant)
            nodes = tuple(node for node, _ in decision.grant)
        job.spans.append(Span(state, self.now_s, None, gpus, nodes))

    def _close(self, job: JobSpans) -> None:
        span = job.last
        span.end_s = self.now_s
        if span.state in _ACTIVE:
            self._used[job.tenant] = self._used.get(job.tenant, 0.0) + span.gpus * (self.now_s - span.begin_s)

    def _end(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.over:
            return
        self._close(job)
        job.over = True
        self._over.append(name)
        while len(self.jobs) > MOST_JOBS and self._over:
            self.jobs.pop(self._over.popleft(), None)

    def _note(self, kind: str, job: str | None, text: str) -> None:
        tenant = self.jobs[job].tenant if job is not None and job in self.jobs else None
        self.entries.append(Entry(self.seen, self.now_s, kind, job, tenant, text))
