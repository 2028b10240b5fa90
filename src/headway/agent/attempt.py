"""One life of a run as plain data, and what each of its workers is told."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.hardware.network import find_network, transport
from headway.recipe import Assignment, FaultPlan, ParityTrial, SpikeReference, SuspectElement
from headway.state.handshake import KEY_VARIABLE
from headway.track import RunFolder

__all__ = ["Attempt", "make_assignment", "network_variables", "without_key", "worker_environment", "worker_variables"]


class Attempt(BaseModel):
    """What to start: everything decided beforehand, as plain data that can be handed to another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    number: int
    workers: int
    nodes: int = 1
    """Machines that they are on; each has an agent, and this run's leads them."""
    spares: int = 0
    """Machines beyond these that wait to take the place of one that is lost."""
    host: str | None = None
    """This machine's address, where the agents of other machines call; None emulates them all here."""
    port: int = 0
    """At which they call; 0 takes a free one."""
    apart: bool = False
    """Whether machines see no common folder: leases, small files and records are kept in the run's object store too."""
    lead: str = "here"
    """What the agent that leads is called: as the node of its machine, where there is one."""
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
    judge: SpikeReference | None = None
    """The step whose loss was a spike, to be looked at again."""
    doubt: SuspectElement | None = None
    """What differed between replicas, to be looked at again."""
    accept: tuple[int, ...] = ()
    """Steps whose spikes are taken as they are."""
    notes: list[str] = []
    """What the user should know before it starts."""
    faults: FaultPlan = FaultPlan()
    trial: ParityTrial | None = None
    """What workers do instead of training."""

    @property
    def several(self) -> bool:
        """Whether there are more machines than this one."""
        return self.nodes + self.spares > 1

    @property
    def folder(self) -> RunFolder:
        """The run's folder, by its parts."""
        return RunFolder(self.run)


def make_assignment(
    attempt: Attempt, rank: int, draw: bool = False, first_rank: int = 0, meet: str | None = None
) -> Assignment:
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
        first_rank=first_rank,
        rendezvous=meet or str(attempt.folder.rendezvous / f"{attempt.number:04d}"),
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
    """What workers on this machine have."""
    return without_key(os.environ) | worker_variables(attempt)


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the run's key: who needs it is told, and nobody else should find it there."""
    return {name: value for name, value in environment.items() if name != KEY_VARIABLE}


def worker_variables(attempt: Attempt) -> dict[str, str]:
    """Workers talk to each other over loopback only, with a thread count that is part of the exactness promise."""
    threads = str(attempt.threads)
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        # Workers import what is installed or what the user put onto PYTHONPATH, and not whatever lies about here.
        "PYTHONSAFEPATH": "1",
        # With deterministic = true cuBLAS needs this before its first call; it costs nothing otherwise.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Large tensors in pages of 2 MiB: in a step of a large model on a CPU, every intermediate is new memory, and
        # the kernel took longer to hand out pages of 4 KiB than the model took to use them.
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def network_variables(name: str, host: str) -> dict[str, str]:
    """How workers here talk to others: what `headway doctor --network` says, but over the interface that this node's
    agent does; said in its log."""
    chosen = transport(find_network(), host=host)
    told = ", ".join(f"{key}={value}" for key, value in chosen.variables.items())
    kept = f"; set before: {', '.join(chosen.kept)}" if chosen.kept else ""
    print(f"{name}: between machines {chosen.name} ({chosen.why}): {told}{kept}", file=sys.stderr, flush=True)
    return dict(chosen.variables)
