"""What a node and the service tell each other, once per second or as soon as something changes.

The node reports every start that it knows; the service answers with every start that it wants there. Both are
complete, so a lost or repeated message does no harm: what the node does not know it starts, what is no longer wanted
it kills, and a start key is started once, whatever happens in between.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from headway.cluster.service.outcome import RankResult
from headway.cluster.service.run_progress import JobProgress
from headway.errors import UsageError

PROTOCOL = 1
"""Version of what is said here: nodes and service must agree."""
_KEY = re.compile(r"([0-9]+(?:_[0-9]+)?):([0-9]+):([0-9]+)")


@dataclass(frozen=True)
class StartReport:
    """One start as its node knows it."""

    key: str
    """JOB:START:RANK."""
    state: Literal["running", "exited"]
    result: RankResult | None = None
    progress: JobProgress | None = None
    """Of a training run, by the node of its first rank."""


@dataclass(frozen=True)
class NodeReport:
    """Everything that a node knows."""

    node: str
    starts: tuple[StartReport, ...] = ()
    problems: tuple[str, ...] = ()
    """Why it should get no jobs, a sentence each."""


@dataclass(frozen=True)
class WantedStart:
    """One start that the service wants on a node."""

    key: str
    action: Literal["run", "end"]
    gpus: tuple[str, ...]
    rank: int
    machines: tuple[str, ...]
    number: int
    """Which start of the job it is, from 1."""
    index: int | None
    """Of an array task."""
    request: dict[str, object] = field(default_factory=dict)
    """LaunchRequest as JSON."""
    signals: tuple[int, ...] = ()
    """Signals to send, in order: those that it has not sent yet."""
    secrets: dict[str, str] | None = field(default_factory=dict)
    """Values of secret variables; None if the service has lost them."""
    tenant: str = ""
    """Whose job it is."""
    gpu_counts: tuple[int, ...] = ()
    """GPUs on each of its machines; empty if the service is older than this field."""


@dataclass(frozen=True)
class WantedStream:
    """What the service wants of a start: a connection to a port, or its log."""

    id: str
    start: str
    """Key of the start."""
    port: int = 0
    """To connect to; 0: its log is wanted."""
    follow: bool = False
    """Whether the log is wanted until the start has ended."""


@dataclass(frozen=True)
class NodeOrders:
    """Everything that the service wants of a node."""

    epoch: int
    """Of the service: a node obeys none older than the newest that it has heard of."""
    cluster: str
    """Id of the cluster: a node obeys no other."""
    starts: tuple[WantedStart, ...] = ()
    begin_within_s: float = 60.0
    """Since the report that they answer was sent: later, what they ask for may have been given up."""
    streams: tuple[WantedStream, ...] = ()
    """Those that it has not heard of yet."""


REPORT = TypeAdapter(NodeReport)
ORDERS = TypeAdapter(NodeOrders)


def start_key(job: str, start: int, rank: int) -> str:
    """The key of one start of a job on one of its nodes."""
    return f"{job}:{start}:{rank}"


def parse_start_key(key: str) -> tuple[str, int, int]:
    """The job, start and rank of a start's key; UsageError for what is none: it becomes the name of files."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise UsageError(f"{key!r} is no start of a job")
    return match[1], int(match[2]), int(match[3])


def start_folder(key: str) -> str:
    """The name of a start's folders: without colons, which lists of paths such as PATH and mounts are split at."""
    return key.replace(":", "-")
