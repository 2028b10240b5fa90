"""What has happened on a cluster of late, for those who look ahead: jobs that came, and how long those took that ended.

People send many jobs of a kind at once. Jobs of one user, tenant and size of which each came within ten minutes of the
one before are a sweep, and how many of it came in the ten minutes before a job is the job's crowd.
"""

from collections import deque
from typing import NamedTuple

from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.runtimes import JobClass, RuntimeHistory

__all__ = ["JobArrival", "JobHistory"]

REMEMBERED = 5000
"""Jobs that came."""
CROWD_S = 600.0
"""Jobs alike that come within so many seconds are a sweep."""


class JobArrival(NamedTuple):
    """A job that was submitted."""

    job: Job
    kind: JobClass


class JobHistory:
    """Told of everything as it happens."""

    def __init__(self) -> None:
        self.runtimes = RuntimeHistory()
        self.came: deque[JobArrival] = deque(maxlen=REMEMBERED)
        """The last jobs that were submitted."""
        self.kinds: dict[str, JobClass] = {}
        """Of jobs that wait or run."""
        self._lately: dict[JobClass, deque[float]] = {}
        self._sweeps: dict[JobClass, int] = {}
        """The last of each kind."""
        self._left: dict[int, int] = {}
        """Of each sweep, jobs that wait or run."""
        self._count = 0

    def submitted(self, job: Job) -> None:
        """A job came."""
        alike = JobClass(job.tenant, job.user, job.gpus)
        lately = self._lately.setdefault(alike, deque())
        while lately and lately[0] < job.submit_s - CROWD_S:
            lately.popleft()
        if not lately:
            self._count += 1
            self._sweeps[alike] = self._count
        kind = alike._replace(crowd=len(lately), sweep=self._sweeps[alike])
        self._left[kind.sweep] = self._left.get(kind.sweep, 0) + 1
        lately.append(job.submit_s)
        self.came.append(JobArrival(job, kind))
        self.kinds[job.name] = kind

    def ended(self, name: str, now: float, worked_s: float) -> None:
        """A job is done after so many seconds of work."""
        self.runtimes.ended(self.kinds[name], now, worked_s)
        self.departed(name)

    def departed(self, name: str) -> None:
        """A job is there no longer."""
        kind = self.kinds.pop(name)
        self._left[kind.sweep] -= 1
        if not self._left[kind.sweep]:
            del self._left[kind.sweep]
            self.runtimes.forget(kind)
