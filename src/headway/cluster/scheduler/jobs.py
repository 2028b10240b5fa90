"""Jobs: what somebody asks for, and what is known of those that wait or run, as columns."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.columns import Columns
from headway.cluster.scheduler.placement import ANYWHERE
from headway.cluster.scheduler.tenants import NOBODY
from headway.errors import UsageError

__all__ = ["ANY_POOL", "ARRAY", "BATCH", "INTERACTIVE", "KINDS", "SERVICE", "STAYS_S", "Job", "JobTable", "check_sizes"]

BATCH, INTERACTIVE, SERVICE, ARRAY = range(4)
KINDS = ("batch", "interactive", "service", "array")
STAYS_S = 3600.0
"""An interactive job runs for so long before it may be stopped, unless it says otherwise."""
ANY_POOL = -1


@dataclass(frozen=True)
class Job:
    """What somebody asks for."""

    name: str
    tenant: str
    gpus: int
    submit_s: float = 0.0
    priority: int = 0
    preemptible: bool = False
    limit_s: float = math.inf
    """The longest it may run; whoever knows no better plans with it."""
    save_every_s: float = 1800.0
    """Seconds of work between its checkpoints."""
    restart_s: float = 120.0
    """Seconds from a start until it works again."""
    within: str | None = None
    """The level of the network that it must lie in one domain of; by default it lies as close as there is room."""
    user: str = ""
    """Who sent it, where somebody said."""
    deadline_s: float = math.inf
    """When it should be done."""
    sizes: tuple[tuple[int, float], ...] = ()
    """The scaling curve of an elastic job: GPUs, `gpus` first, and how fast it works with them (seconds of its work a
    second). It starts with the first size, and has more when GPUs idle."""
    kind: str = "batch"
    """Or "interactive" (first of its level, and left alone for an hour), "service" (never counts as long, and yields to
    higher priorities alone) or "array" (one of many of one shape)."""
    min_run_s: float = 0.0
    """It runs so long before it may be stopped; two minutes at least, and an hour by default if it is interactive."""

    def array(self, count: int) -> "list[Job]":
        """So many jobs of this shape, each for itself."""
        if count < 1 or count != int(count):
            raise UsageError(f"job {self.name} is an array of {count}", hint="one at least")
        return [replace(self, name=f"{self.name}[{number}]", kind="array") for number in range(count)]


class JobTable(Columns):
    """Jobs that wait or run."""

    if TYPE_CHECKING:
        tenant: NDArray[np.int32]
        gpus: NDArray[np.int32]
        least: NDArray[np.int32]
        speed: NDArray[np.float64]
        other_gpu_s: NDArray[np.float64]
        priority: NDArray[np.int32]
        preemptible: NDArray[np.bool_]
        pools: NDArray[np.int64]
        submit_s: NDArray[np.float64]
        limit_s: NDArray[np.float64]
        deadline_s: NDArray[np.float64]
        kind: NDArray[np.int8]
        min_run_s: NDArray[np.float64]
        save_every_s: NDArray[np.float64]
        restart_s: NDArray[np.float64]
        within: NDArray[np.int8]
        running: NDArray[np.bool_]
        since_s: NDArray[np.float64]
        done_s: NDArray[np.float64]
        ran_s: NDArray[np.float64]
        waits_s: NDArray[np.float64]
        number: NDArray[np.int64]
        starts: NDArray[np.int32]
        failed: NDArray[np.bool_]
        known_s: NDArray[np.float64]
        user: NDArray[np.str_]

    def __init__(self) -> None:
        super().__init__(
            {
                "tenant": (np.int32, NOBODY),
                "gpus": (np.int32, 0),  # that it has, or waits for
                "least": (np.int32, 0),  # that it can do with
                "speed": (np.float64, 1.0),  # seconds of its work a second
                "other_gpu_s": (np.float64, 0.0),  # GPU-seconds had at other sizes, beyond its seconds at this one
                "priority": (np.int32, 0),
                "preemptible": (np.bool_, False),
                "pools": (np.int64, ANY_POOL),  # a bit for each pool that it can use
                "submit_s": (np.float64, 0.0),
                "limit_s": (np.float64, math.inf),
                "deadline_s": (np.float64, math.inf),
                "kind": (np.int8, BATCH),
                "min_run_s": (np.float64, 0.0),
                "save_every_s": (np.float64, 1800.0),
                "restart_s": (np.float64, 120.0),
                "within": (np.int8, ANYWHERE),  # the level of the domain that it must lie in
                "running": (np.bool_, False),
                "since_s": (np.float64, math.nan),  # when it was started last
                "done_s": (np.float64, 0.0),  # seconds of work that earlier starts left behind
                "ran_s": (np.float64, 0.0),  # seconds that earlier starts held their GPUs
                "waits_s": (np.float64, 0.0),  # since when it waits, or waited last
                "number": (np.int64, 0),  # in the order they were told
                "starts": (np.int32, 0),
                "failed": (np.bool_, False),  # waits since a node of its failed
                "known_s": (np.float64, math.nan),  # seconds of work in all: oracles alone are told
                "user": ("U32", ""),
            },
            room=1024,
        )


def check_sizes(job: Job) -> None:
    """UsageError for a scaling curve that is none."""
    told = f"job {job.name}: sizes are {', '.join(f'{gpus}: {speed}' for gpus, speed in job.sizes)}"
    gpus, speeds = zip(*job.sizes, strict=True)
    if gpus[0] != job.gpus or any(one != int(one) for one in gpus) or any(np.diff(gpus) <= 0):
        raise UsageError(told, hint=f"GPUs in whole numbers, from the {job.gpus} that it needs upwards")
    if not all(0 < speed < math.inf for speed in speeds) or any(np.diff(speeds) <= 0):
        raise UsageError(told, hint="a larger size is faster, and none stands still")
