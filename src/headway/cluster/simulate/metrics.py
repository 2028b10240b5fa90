"""Results of a simulation: waiting, delay and completion of jobs, GPU usage, and unmet guarantees."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate.job_trace import JobTrace

LONG_S = 86400.0
Cause = Literal["preemption", "failure", "maintenance", "resize", "compaction"]
CAUSES: tuple[Cause, ...] = ("preemption", "failure", "maintenance", "resize", "compaction")


@dataclass(frozen=True)
class SimulationResult:
    """Times of each job, and usage of the cluster."""

    trace: JobTrace
    gpus: int
    first_start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    starts: NDArray[np.int64]
    used_gpu_s: float
    """Between the first submission and the last end."""
    lost_gpu_s: dict[str, float]
    """Repeated work and restarts, by cause."""
    stops: dict[str, int]
    """By cause; resizes of elastic jobs included."""
    owed_gpu_s: float
    """What tenants requested within their guarantees and did not get."""
    guaranteed_gpu_s: float
    cycles: int
    times: NDArray[np.float64]
    """Of the cycles, for plots."""
    used: NDArray[np.int64]
    waiting: NDArray[np.int64]

    @property
    def completion_s(self) -> NDArray[np.float64]:
        """From submission to the end."""
        return self.end_s - self.trace.submit_s

    @property
    def delay_s(self) -> NDArray[np.float64]:
        """Completion time minus run time."""
        return self.completion_s - self.trace.duration_s


class SimulationMeter:
    """Collects the results of a simulation as it runs."""

    def __init__(self, trace: JobTrace, snapshot: ClusterSnapshot) -> None:
        self._trace, self._snapshot = trace, snapshot
        count = len(trace)
        self._first, self._end = np.full(count, math.nan), np.full(count, math.nan)
        self._starts = np.zeros(count, np.int64)
        self._leaves = np.array(snapshot.tenants.leaves())
        self._promised = float(snapshot.tenants.guarantee[self._leaves].sum())
        self._now = float(trace.submit_s[0])
        self._used, self._owed, self._guaranteed = 0.0, 0.0, 0.0
        self._lost: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._stops: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self._cause: dict[int, Cause] = {}
        """What stopped a job last."""
        self._samples = list[tuple[float, int, int]]()
        """Per cycle: time, GPUs used and GPUs waited for."""

    def advance(self, now: float) -> None:
        """Count the time since the last event."""
        passed = now - self._now
        if passed <= 0:
            return
        self._now = now
        leaves, tenants = self._leaves, self._snapshot.tenants
        self._used += passed * float(tenants.used[leaves].sum())
        self._owed += passed * float(tenants.unmet_gpus()[leaves].sum())
        self._guaranteed += passed * self._promised

    def started(self, job: int, now: float) -> None:
        """Count a start."""
        self._starts[job] += 1
        if math.isnan(self._first[job]):
            self._first[job] = now

    def stopped(self, job: int, lost_gpu_s: float, cause: Cause) -> None:
        """Count a stop, and the work it lost."""
        self._lost[cause] += lost_gpu_s
        self._stops[cause] += 1
        self._cause[job] = cause

    def ended(self, job: int, now: float, restart_gpu_s: float) -> None:
        """Count an end; `restart_gpu_s` is what the restart of its last start took."""
        self._end[job] = now
        if job in self._cause:
            self._lost[self._cause[job]] += restart_gpu_s

    def cycle(self) -> None:
        """Count a scheduling cycle."""
        waiting = self._snapshot.jobs.gpus[self._snapshot.queue].sum()
        used = self._snapshot.jobs.gpus[self._snapshot.active].sum()
        self._samples.append((self._now, int(used), int(waiting)))

    def result(self) -> SimulationResult:
        """Return the results at the end."""
        times, used, waiting = np.array(self._samples).reshape(-1, 3).T
        return SimulationResult(
            self._trace,
            self._snapshot.gpus,
            self._first,
            self._end,
            self._starts,
            self._used,
            self._lost,
            self._stops,
            self._owed,
            self._guaranteed,
            len(self._samples),
            times,
            used.astype(np.int64),
            waiting.astype(np.int64),
        )


def summary(result: SimulationResult) -> dict[str, Any]:
    """Return the metrics by which policies are compared."""
    completion, delay, trace = result.completion_s, result.delay_s, result.trace
    span = float(np.nanmax(result.end_s) - trace.submit_s[0])
    long = trace.duration_s > LONG_S
    return {
        "jobs": len(trace),
        "mean_jct_s": float(completion.mean()),
        "p50_jct_s": float(np.percentile(completion, 50)),
        "p90_jct_s": float(np.percentile(completion, 90)),
        "p99_jct_s": float(np.percentile(completion, 99)),
        "mean_delay_s": float(delay.mean()),
        "p99_delay_s": float(np.percentile(delay, 99)),
        "worst_delay_s": float(delay.max()),
        "mean_delay_long_s": float(delay[long].mean()) if long.any() else 0.0,
        "mean_first_wait_s": float((result.first_start_s - trace.submit_s).mean()),
        "utilization": result.used_gpu_s / max(span * result.gpus, 1e-9),
        "deadlines": int(np.count_nonzero(np.isfinite(trace.deadline_s))),
        "deadline_misses": int(np.count_nonzero(result.end_s > trace.deadline_s)),
        "quota_deficit": result.owed_gpu_s / max(result.guaranteed_gpu_s, 1.0),
        "preemptions": result.stops["preemption"],
        "failures": result.stops["failure"],
        "moves": result.stops["maintenance"],
        "resizes": result.stops["resize"],
        "compactions": result.stops["compaction"],
        "lost_gpu_s": result.lost_gpu_s,
        "cycles": result.cycles,
    }
