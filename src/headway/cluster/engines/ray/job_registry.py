"""The jobs of one user on a Ray cluster, live and over, and their records in the cluster's key-value store."""

from collections.abc import Iterator
from typing import Any

from headway.cluster.engines.engine import OVER, State, array_status, status_from_json
from headway.cluster.engines.ray.job import RayJob
from headway.cluster.engines.ray.kv_store import RayKvStore

HISTORY = 2000
"""Jobs that are over and still known."""


class RayJobRegistry:
    """Looks up jobs by id; the id of an array stands for all of its tasks. Every change is stored at once."""

    def __init__(self, store: RayKvStore) -> None:
        self._store = store
        self.live: dict[str, RayJob] = {}
        """Jobs that are not over, oldest first."""
        self._over: dict[str, dict[str, Any]] = {}
        """Records of those that are, oldest first."""
        self._arrays: dict[str, int] = {}

    def load(self) -> Iterator[tuple[RayJob, State]]:
        """Read the records of an earlier controller; yield the jobs that are not over, with their last states."""
        self._arrays |= {name: record["copies"] for name, record in self._store.read_all("array").items()}
        for record in sorted(self._store.read_all("job").values(), key=lambda record: record["order"]):
            state = record["status"]["state"]
            if state in OVER:
                self._over[record["id"]] = record
            else:
                yield RayJob.from_record(record), state

    def add_array(self, name: str, tasks: int) -> None:
        """Record an array."""
        self._store.put("array", name, {"copies": tasks})
        self._arrays[name] = tasks

    def change(self, job: RayJob, state: State, reason: str) -> None:
        """Set and store the state of a job."""
        job.state, job.reason = state, reason
        record = job.record()
        self._store.put("job", job.id, record)
        if state in OVER:
            self._over[job.id] = record
            self.live.pop(job.id, None)
            if len(self._over) > HISTORY:
                oldest = next(iter(self._over))
                del self._over[oldest]
                self._store.remove("job", oldest)
        else:
            self.live[job.id] = job

    def is_known(self, name: str) -> bool:
        """Whether there is a job or an array of this id."""
        return name in self._arrays or name in self.live or name in self._over

    def find_live(self, name: str) -> list[RayJob]:
        """The jobs of this id that are not over."""
        return [self.live[job] for job in self._ids(name) if job in self.live]

    def records(self, name: str) -> list[dict[str, Any]]:
        """The records of a job, or of all tasks of an array."""
        known = [job for job in self._ids(name) if job in self.live or job in self._over]
        return [self.live[job].record() if job in self.live else self._over[job] for job in known]

    def status(self, name: str) -> dict[str, Any] | None:
        """The fields of a JobStatus as JSON; None for an unknown job."""
        statuses = [record["status"] for record in self.records(name)]
        if name not in self._arrays or not statuses:
            return statuses[0] if statuses else None
        combined = array_status([status_from_json(status) for status in statuses])
        return combined.__dict__ | {"machines": list(combined.machines)}

    def _ids(self, name: str) -> list[str]:
        return [f"{name}_{index}" for index in range(self._arrays[name])] if name in self._arrays else [name]
