"""Recent arrivals and run times of a cluster, from which start times are estimated.

Users submit many similar jobs at once. Jobs of the same user, tenant and size that arrive within ten minutes of one
another are a sweep; a job's burst is how many of them arrived in the ten minutes before it.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.cluster.scheduler.jobs import Job, job_from_json, job_to_json
from headway.cluster.scheduler.runtimes import JobClass, RuntimeHistory

MAX_ARRIVALS = 5000
SWEEP_GAP_S = 600.0
"""Similar jobs that arrive within this time belong to one sweep."""


class JobArrival(NamedTuple):
    """A submitted job."""

    job: Job
    job_class: JobClass


class JobHistory:
    """Arrivals and ends of jobs, reported as they happen."""

    def __init__(self) -> None:
        self.runtimes = RuntimeHistory()
        self.arrivals: deque[JobArrival] = deque(maxlen=MAX_ARRIVALS)
        """The last submitted jobs."""
        self.classes: dict[str, JobClass] = {}
        """Class of each waiting or running job."""
        self._recent: dict[JobClass, deque[float]] = {}
        self._sweeps: dict[JobClass, int] = {}
        """Last sweep of each class."""
        self._active: dict[int, int] = {}
        """Waiting and running jobs of each sweep."""
        self._count = 0

    def submitted(self, job: Job) -> None:
        """Record a submitted job."""
        similar = JobClass(job.tenant, job.user, job.gpus)
        recent = self._recent.setdefault(similar, deque())
        while recent and recent[0] < job.submit_s - SWEEP_GAP_S:
            recent.popleft()
        if not recent:
            self._count += 1
            self._sweeps[similar] = self._count
        job_class = similar._replace(burst=len(recent), sweep=self._sweeps[similar])
        self._active[job_class.sweep] = self._active.get(job_class.sweep, 0) + 1
        recent.append(job.submit_s)
        self.arrivals.append(JobArrival(job, job_class))
        self.classes[job.name] = job_class

    def ended(self, name: str, now: float, worked_s: float) -> None:
        """Record a job that finished after `worked_s` seconds of work."""
        self.runtimes.ended(self.classes[name], now, worked_s)
        self.departed(name)

    def departed(self, name: str) -> None:
        """Record a job that left the cluster, finished or not."""
        job_class = self.classes.pop(name)
        self._active[job_class.sweep] -= 1
        if not self._active[job_class.sweep]:
            del self._active[job_class.sweep]
            self.runtimes.forget(job_class)

    def to_json(self) -> dict[str, Any]:
        """Return the history as JSON values for `from_json`."""
        return {
            "arrivals": [[job_to_json(job), job_class] for job, job_class in self.arrivals],
            "classes": self.classes,
            "recent": [[similar, list(times)] for similar, times in self._recent.items()],
            "sweeps": [[similar, number] for similar, number in self._sweeps.items()],
            "active": [[sweep, jobs] for sweep, jobs in self._active.items()],
            "count": self._count,
            "runtimes": self.runtimes.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobHistory":
        """Return the history that `to_json` wrote."""
        history = cls()
        history.runtimes = RuntimeHistory.from_json(values["runtimes"])
        history.arrivals += [JobArrival(job_from_json(job), JobClass(*similar)) for job, similar in values["arrivals"]]
        history.classes = {name: JobClass(*similar) for name, similar in values["classes"].items()}
        history._recent = {JobClass(*similar): deque(times) for similar, times in values["recent"]}
        history._sweeps = {JobClass(*similar): number for similar, number in values["sweeps"]}
        history._active = dict(values["active"])
        history._count = values["count"]
        return history
