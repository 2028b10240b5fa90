"""When each job of a cluster waited, ran and ended: spans, folded from the record of its service.

The lines are those of `headway.cluster.service.live_state`. Nothing is decided again, and lines that change no job's
state are passed over.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.cluster.service.grants import LiveDecision, decode

MOST_JOBS = 5000
"""Whose spans are kept; of jobs that are over, the newest."""
HOLDING = ("starting", "running", "ending")
"""States in which a job holds GPUs."""


@dataclass
class JobSpan:
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
    tenant: str | None
    """None if the record no longer tells."""
    gpus: int
    spans: list[JobSpan] = field(default_factory=list)
    over: bool = False

    @property
    def last(self) -> JobSpan:
        """The newest span."""
        return self.spans[-1]


class ClusterRecord:
    """The fold; `apply` takes the next line."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Of the newest line."""
        self.jobs: dict[str, JobSpans] = {}
        self._over: deque[str] = deque()

    def apply(self, line: Mapping[str, Any]) -> None:
        """Take the next line of the record."""
        self.now_s = max(self.now_s, float(line["at"]))
        if "decided" in line:
            for decision in map(decode, line["decided"]):
                self._decided(decision)
        elif "job" in line:
            fields = line["job"]
            spans = [JobSpan("waiting", self.now_s)]
            self.jobs[fields["name"]] = JobSpans(fields["name"], fields["tenant"], int(fields["gpus"]), spans)
        elif "running" in line:
            self._enter(line["running"], "running")
        elif "stopping" in line:
            self._enter(line["stopping"], "ending")
        elif "hold" in line:
            self._enter(line["hold"], "held")
        elif "unhold" in line:
            self._enter(line["unhold"], "waiting")
        elif "exited" in line and line.get("again"):
            self._enter(line["exited"], "waiting")
        elif "exited" in line:
            self._end(line["exited"])

    def _decided(self, decision: LiveDecision) -> None:
        if decision.kind == "start":
            gpus = sum(len(ids) for _, ids in decision.grant)
            self._enter(decision.job, "starting", gpus, tuple(node for node, _ in decision.grant))
        elif decision.kind in ("stop", "move", "resize"):
            self._enter(decision.job, "ending")

    def _enter(self, name: str, state: str, gpus: int | None = None, nodes: tuple[str, ...] = ()) -> None:
        """Begin the next span of a job; one that holds GPUs takes them over from the one before."""
        job = self.jobs.get(name)
        if job is None:  # it was submitted before the oldest line that is kept
            job = self.jobs[name] = JobSpans(name, None, gpus or 0)
        elif job.over or job.last.state == state:
            return
        else:
            job.last.end_s = self.now_s
            if gpus is None and state in HOLDING:
                gpus, nodes = job.last.gpus, job.last.nodes
        job.spans.append(JobSpan(state, self.now_s, None, gpus or 0, nodes))

    def _end(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.over:
            return
        job.last.end_s, job.over = self.now_s, True
        self._over.append(name)
        while len(self.jobs) > MOST_JOBS and self._over:
            self.jobs.pop(self._over.popleft(), None)
