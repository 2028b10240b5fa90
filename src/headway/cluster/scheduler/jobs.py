"""Jobs: what users request, and the table of waiting and running jobs."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import numpy as np

from headway.cluster.scheduler.columns import Columns, column
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.tenants import NO_TENANT
from headway.errors import UsageError

BATCH, INTERACTIVE, SERVICE, ARRAY = range(4)
KINDS = ("batch", "interactive", "service", "array")
INTERACTIVE_MIN_RUN_S = 3600.0
"""Default `min_run_s` of an interactive job."""
ANY_POOL = -1


@dataclass(frozen=True)
class Job:
    """A job as its user requests it."""

    name: str
    tenant: str
    gpus: int
    submit_s: float = 0.0
    priority: int = 0
    preemptible: bool = False
    limit_s: float = math.inf
    """Time limit; backfill plans with it."""
    save_every_s: float = 1800.0
    """Seconds of work between checkpoints."""
    restart_s: float = 120.0
    """Seconds from a restart until it works again."""
    within: str | None = None
    """Network level (such as a rack) whose domains it must not span; by default it is placed as close as possible."""
    user: str = ""
    """Who submitted it, if known."""
    deadline_s: float = math.inf
    """When it should be done."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Scaling curve of an elastic job: GPUs, `gpus` first, and its speed with them (seconds of work per second). It
    starts at the first size and grows when GPUs are idle."""
    kind: str = "batch"
    """Or "interactive" (first of its level, not preempted for an hour), "service" (always counts as new, yields to
    higher priorities only) or "array" (one of many jobs of the same shape)."""
    min_run_s: float = 0.0
    """Minimum run time before preemption; at least two minutes, and an hour by default if it is interactive."""
    machines: int = 0
    """Nodes that it must have, with an equal number of GPUs on each; 0: any."""
    cpus: float = 0.0
    """On each of its nodes."""
    memory_bytes: float = 0.0
    """On each of its nodes."""
    avoid: tuple[str, ...] = ()
    """Nodes that it must not get."""

    def array(self, count: int) -> "list[Job]":
        """Return `count` independent jobs of this shape."""
        if count < 1 or count != int(count):
            raise UsageError(f"job {self.name}: array size is {count}", hint="a whole number, at least 1")
        return [replace(self, name=f"{self.name}[{number}]", kind="array") for number in range(count)]


_DEFAULTS = {column.name: column.default for column in fields(Job) if column.default is not MISSING}


def job_to_json(job: Job) -> dict[str, Any]:
    """Return a job as JSON values, without what is as by default."""
    values: dict[str, Any] = {"name": job.name, "tenant": job.tenant, "gpus": job.gpus}
    for key, default in _DEFAULTS.items():
        value = getattr(job, key)
        if value != default:
            values[key] = "inf" if value == math.inf else value
    return values


def job_from_json(values: Mapping[str, Any]) -> Job:
    """Return the job that `job_to_json` wrote."""
    known: dict[str, Any] = {key: math.inf if value == "inf" else value for key, value in values.items()}
    return Job(**known)


class JobTable(Columns):
    """Waiting and running jobs."""

    tenant = column(np.int32, NO_TENANT)
    gpus = column(np.int32, 0)  # that it holds, or waits for
    least = column(np.int32, 0)  # smallest size
    speed = column(np.float64, 1.0)  # seconds of work per second
    other_gpu_s = column(np.float64, 0.0)  # GPU-seconds held at other sizes, beyond its seconds at this one
    priority = column(np.int32, 0)
    preemptible = column(np.bool_, False)
    pools = column(np.int64, ANY_POOL)  # bit mask of the pools it can use
    submit_s = column(np.float64, 0.0)
    limit_s = column(np.float64, math.inf)
    deadline_s = column(np.float64, math.inf)
    kind = column(np.int8, BATCH)
    min_run_s = column(np.float64, 0.0)
    save_every_s = column(np.float64, 1800.0)
    restart_s = column(np.float64, 120.0)
    within = column(np.int8, ANYWHERE)  # level of the network domain that must hold it
    running = column(np.bool_, False)
    since_s = column(np.float64, math.nan)  # last start
    done_s = column(np.float64, 0.0)  # seconds of work saved by earlier starts
    ran_s = column(np.float64, 0.0)  # seconds that earlier starts held their GPUs
    waits_s = column(np.float64, 0.0)  # when it last began to wait
    number = column(np.int64, 0)  # in order of submission
    starts = column(np.int32, 0)
    failed = column(np.bool_, False)  # waiting because one of its nodes failed
    known_s = column(np.float64, math.nan)  # total seconds of work, which only oracles are told
    user = column(np.dtype("U32"), "")
    machines = column(np.int32, 0)  # nodes with an equal number of its GPUs; 0: any
    cpus = column(np.float64, 0.0)  # per node
    memory_bytes = column(np.float64, 0.0)  # per node
    starting = column(np.bool_, False)  # holds GPUs, and its nodes have not confirmed that it runs
    ending = column(np.bool_, False)  # was told to stop, and its nodes have not confirmed that it has
    saved_at_s = column(np.float64, math.nan)  # when its last save began to count, if it reports its saves
    held = column(np.bool_, False)  # waits outside the queue until a user releases it

    def __init__(self) -> None:
        super().__init__(capacity=1024)


def check_sizes(job: Job) -> None:
    """Raise UsageError for an invalid scaling curve."""
    message = f"job {job.name}: sizes are {', '.join(f'{gpus}: {speed}' for gpus, speed in job.sizes)}"
    sizes, speeds = zip(*job.sizes, strict=True)
    if sizes[0] != job.gpus or any(gpus != int(gpus) for gpus in sizes) or any(np.diff(sizes) <= 0):
        raise UsageError(message, hint=f"whole numbers of GPUs, increasing from the {job.gpus} requested")
    if not all(0 < speed < math.inf for speed in speeds) or any(np.diff(speeds) <= 0):
        raise UsageError(message, hint="finite speeds above 0, higher for each larger size")
