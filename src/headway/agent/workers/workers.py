"""The workers of a run as the supervisor sees them, whether they are on this machine or on several nodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Literal

from headway.agent.attempt import Attempt
from headway.agent.saving.buffers import BufferHost, StateFiles
from headway.agent.supervise.recover import Failure, NodeCapacity
from headway.agent.supervise.worker_stacks import StackDump
from headway.recipe import Recipe
from headway.state import MessageChannel
from headway.track import Recorder
from headway.track.heartbeat import HeartbeatPages

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease


class NodeLost(Exception):
    """A node was lost before it had workers, perhaps with the state that the attempt resumes from."""


class TooFewNodes(Exception):
    """A run that has already trained lacks nodes: it is worth restarting once there are enough."""


@dataclass(frozen=True)
class NodeEvent:
    """Something that happened to a node, whether or not it had workers."""

    node: str
    state: Literal["silent", "heard", "lost", "leaving", "left", "missing"]
    text: str


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended."""

    rank: int
    pid: int
    code: int


class Workers(ABC):
    """Starts, polls and ends the workers of a run: a `WorkerGroup` on one machine, a `NodeGroup` on several."""

    memory: BufferHost
    """Holds the buffers that workers save into."""

    # -- one attempt, in the order of the calls

    @abstractmethod
    def gather(
        self, attempt: Attempt, heartbeats: HeartbeatPages, recorder: Recorder, tick: Callable[[], None]
    ) -> None:
        """Wait until a worker can be started for every rank, calling `tick` meanwhile; raise TooFewNodes at last."""

    @abstractmethod
    def assign_initializer(self, attempt: Attempt) -> None:
        """Start the process that initializes the weights of a custom model, as rank 0."""

    @abstractmethod
    def fork(self, count: int) -> None:
        """Have spares for so many workers."""

    @abstractmethod
    def survey(self) -> None:
        """Poll every node; those that do not answer are lost."""

    @abstractmethod
    def assign_all(self, attempt: Attempt, state: StateFiles | None) -> Iterator[tuple[int, MessageChannel]]:
        """Give every rank its assignment, and `state` to resume from; yield each rank's channel. Raise NodeLost."""

    @abstractmethod
    def poll(self) -> list[WorkerExit]:
        """Process what workers and nodes have reported; return the workers that have ended."""

    @abstractmethod
    def attend(self) -> None:
        """Process what nodes have reported; notice which joined and which are lost."""

    @abstractmethod
    def filenos(self) -> list[int]:
        """Descriptors to select on."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Process ids of live workers by rank, as their machines number them."""

    @abstractmethod
    def state(self, rank: int) -> str:
        """The kernel's letter for a worker's state."""

    @abstractmethod
    def stacks(self, folder: Path, attempt: int, native: bool = True) -> StackDump:
        """The stacks of all workers."""

    @abstractmethod
    def signal(self, number: Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to workers, all or some."""

    @abstractmethod
    def hold(self) -> None:
        """Have the launcher hold what another agent needs to adopt these workers."""

    @abstractmethod
    def release(self) -> None:
        """The attempt is over: nothing is left to adopt."""

    @abstractmethod
    def dismiss(self) -> None:
        """End all workers at once; spares stay."""

    # -- after a failed attempt, or under another agent

    @abstractmethod
    def adopt(self) -> Mapping[int, MessageChannel]:
        """Take over the workers of an agent that died: their channels by rank."""

    @abstractmethod
    def restart(self, attempt: Attempt, avoid: str, why: str, zygote_died: bool) -> None:
        """Prepare for the next attempt, without the node `avoid` if there is one."""

    @abstractmethod
    def finish(self, exit_status: int) -> None:
        """The run is over: what nodes exit with."""

    # -- of nodes; a single machine is a group of one that never changes

    lost_nodes: list[tuple[str, str]]
    """Nodes lost in this attempt, and how."""
    node_events: list[NodeEvent]
    """What happened to nodes and is not recorded yet."""
    preempted: bool
    """Whether a batch system has announced that it takes a node away."""
    takeover: str
    """The sentence that says which leader was lost, where this agent succeeds another machine's."""

    store_lease: "StoreLease | None"
    """The leader lease in the run's object store, where nodes share no folder."""

    @property
    @abstractmethod
    def has_workers(self) -> bool:
        """Whether workers of an earlier agent were adopted and go on training."""

    @property
    @abstractmethod
    def minority(self) -> bool:
        """Whether fewer than half of the nodes that could lead are left."""

    @abstractmethod
    def heard_at(self) -> float:
        """When heartbeats of all workers were last known (`time.monotonic`): the agent of a node may be silent while
        its workers train."""

    @abstractmethod
    def leaving_with_workers(self) -> tuple[str, ...]:
        """Nodes that were asked to leave and still have workers."""

    @abstractmethod
    def let_leave(self) -> None:
        """Let nodes go that were asked to leave and have no workers any more."""

    @abstractmethod
    def slots(self, joined_for_s: float) -> int:
        """Workers that fit on nodes that joined at least so long ago; 0 where nodes cannot join."""

    @abstractmethod
    def node_of(self, failure: Failure) -> str:
        """The node where a failure happened, if there are nodes and it is known."""

    @abstractmethod
    def capacity(self, recipe: Recipe, attempt: Attempt, wanted: int) -> NodeCapacity | None:
        """How many workers the nodes that are left can have; None where that cannot change."""
