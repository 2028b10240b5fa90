"""One life of a run as plain data, and what each of its workers is told."""

import os
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.recipe import Assignment, Doubt, FaultPlan, Judge, Trial
from headway.track import RunFolder

__all__ = ["Attempt", "assignment", "worker_environment"]


class Attempt(BaseModel):
    """What to start: everything decided beforehand, as plain data that can be handed to another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    number: int
    workers: int
    device: Literal["cpu", "cuda"]
    threads: int
    checkpoint: str | None = None
    """The checkpoint to go on from: a folder, or the address of one in an object store."""
    from_memory: bool = False
    """Whether to go on from the state in the agent's memory."""
    from_step: int = 0
    recipe_changes: dict[str, Any] = {}
    source: Literal["memory", "disk", "store", "start"] | None = None
    """Where the agent itself took the state from, after an attempt that failed; None where somebody started it."""
    judge: Judge | None = None
    """The step whose loss was a spike, to be looked at again."""
    doubt: Doubt | None = None
    """What differed between replicas, to be looked at again."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes are taken as they are."""
    notes: list[str] = []
    """What the user should know before it starts."""
    faults: FaultPlan = FaultPlan()
    trial: Trial | None = None
    """What workers do instead of training."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder, by its parts."""
        return RunFolder(self.run)


def assignment(attempt: Attempt, rank: int, draw: bool = False) -> Assignment:
    """What one worker of an attempt is told; a new meeting place for every attempt, so that nothing stale is read."""
    process = "draw" if draw else f"rank-{rank}"
    return Assignment(
        run=str(attempt.run),
        attempt=attempt.number,
        rank=rank,
        workers=attempt.workers,
        device=attempt.device,
        threads=attempt.threads,
        log=str(attempt.folder.logs / f"{attempt.number:04d}-{process}.log"),
        rendezvous=str(attempt.folder.rendezvous / f"{attempt.number:04d}"),
        asked_ns=time.monotonic_ns(),
        checkpoint=attempt.checkpoint,
        from_memory=attempt.from_memory,
        judge=attempt.judge,
        doubt=attempt.doubt,
        accept=attempt.accept,
        draw=draw,
        trial=attempt.trial,
        faults=attempt.faults,
    )


def worker_environment(attempt: Attempt) -> dict[str, str]:
    """Workers talk to each other over loopback only, with a thread count that is part of the exactness promise."""
    threads = str(attempt.threads)
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        # Workers import what is installed or what the user put onto PYTHONPATH, and not whatever lies about here.
        "PYTHONSAFEPATH": "1",
        # With deterministic = true cuBLAS needs this before its first call; it costs nothing otherwise.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
