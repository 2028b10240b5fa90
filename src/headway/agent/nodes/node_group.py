"""The workers of a run on several nodes, as the leader sees them: which node has each rank, what they report."""

import base64
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from headway.agent.attempt import Attempt, make_assignment
from headway.agent.fd_store import FdStore
from headway.agent.launch.mesh_checks import mesh_can_run
from headway.agent.nodes.leave import LeaveEffect, effect_of_leaving, leader_stays, node_of_machine
from headway.agent.nodes.members import Member, RemoteChannel
from headway.agent.nodes.membership import ALIVE_S, Membership
from headway.agent.nodes.node_memory import NodeMemory
from headway.agent.nodes.wait_reporter import WaitReporter
from headway.agent.remote.folder_server import RunFolderServer
from headway.agent.saving.buffers import StateFiles
from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.recover import SUSPECT, Failure, NodeCapacity
from headway.agent.supervise.worker_stacks import Frame, StackDump, WorkerStack
from headway.agent.workers.workers import NodeEvent, NodeLost, TooFewNodes, WorkerExit, Workers
from headway.agent.workers.zygote import log_tail
from headway.errors import StateError, WorkerError
from headway.recipe import Assignment, Recipe
from headway.state import Message, MessageChannel
from headway.state.address import is_in_store
from headway.track import Recorder, read_recipe
from headway.track.heartbeat import HeartbeatPages
from headway.track.process_state import process_state
from headway.track.suspects import note_suspect

POLL_S = 0.15
TOGETHER_S = 20.0
"""How long a run that could begin waits for the other nodes that were started with it."""
FIRST_S = 600.0
"""How long the first node may take to be ready: torch may come from a slow disk that many read at once."""
KILLED = -int(signal.SIGKILL)


@final
class NodeGroup(Workers):
    """All nodes of a run."""

    memory: NodeMemory

    def __init__(
        self, nodes: Membership, fd_store: FdStore, folder_server: RunFolderServer, succeeds: str = ""
    ) -> None:
        """`succeeds` is the machine that led before this agent, if one did."""
        self.nodes, self._folder_server = nodes, folder_server
        self.memory = NodeMemory(nodes, fd_store, succeeds)
        self.takeover = f"leader {succeeds} was lost; {nodes.lease.lead} is the new leader" if succeeds else ""
        self.lost_nodes, self.node_events, self.preempted, self.store_lease = [], [], False, nodes.lease.store_lease
        self.processes: list[subprocess.Popen[bytes]] = []
        """The agents of the nodes, where all of them are on this machine."""
        self._exit_status = 1
        self._attempt: Attempt | None = None
        self._leave_effects: dict[str, LeaveEffect] = {}
        self._began_with = frozenset[str]()
        self._heartbeats: HeartbeatPages | None = None
        self._channels: dict[int, RemoteChannel] = {}
        self._pids: dict[int, int] = {}
        self._states: dict[int, str] = {}
        self._exits = deque[WorkerExit]()
        nodes.on_message, nodes.on_lost, nodes.on_silence = self._receive, self._lose, self._note_silence
        nodes.on_leave = self._answer_leave

    # -- placement

    def gather(
        self, attempt: Attempt, heartbeats: HeartbeatPages, recorder: Recorder, tick: Callable[[], None]
    ) -> None:
        """Wait until there are nodes for all workers, and place each rank on one."""
        self._heartbeats, self._attempt = heartbeats, attempt
        self.nodes.begin_attempt(attempt.number)
        clock = self.nodes.now
        began = clock()
        recipe = read_recipe(attempt.folder)
        join_s = recipe.train.join_s
        deadline, soon, first = began + max(FIRST_S, join_s), began + FIRST_S, True
        # Nodes that were started together are placed by name, not by who was first.
        expected = attempt.nodes + attempt.spares if attempt.source is None else 0
        url = need_store(recipe, attempt.run.name) if attempt.apart else ""
        lease = self.nodes.lease
        waiting = WaitReporter(attempt, lease.host, lease.port, began, url, self._place_of_node)
        while (len(self.nodes.able()) < expected and clock() < soon) or not self.place_ranks(attempt.workers):
            self.nodes.wait(POLL_S)
            tick()
            now = clock()
            if text := waiting.message(self.nodes.members, now, deadline):
                recorder.event("waiting", text=text)
            if first and self.nodes.able():
                first, deadline, soon = False, now + join_s, now + TOGETHER_S
            if self.nodes.suspects and attempt.source is None and now > soon:
                names = ", ".join(sorted(self.nodes.suspects))
                recorder.event("log", message=f"no other machines have joined: {names} may have workers again")
                self.nodes.suspects = {}
            if self._all_ended() or now > deadline:
                raise self._too_few(attempt, waiting.too_few(self.nodes.members, now))
        if expected and (text := waiting.started_without(self.nodes.members, clock())):
            self.node_events.append(NodeEvent("", "missing", text))

    def _all_ended(self) -> bool:
        """Whether no node can join any more: all are processes of this machine, and have ended."""
        return bool(self.processes) and all(process.poll() is not None for process in self.processes)

    def _place_of_node(self, rank: int) -> str:
        """Where a node should be that has not joined: a process of this machine, or a machine by its engine's name."""
        if self.processes:
            process = self.processes[rank]
            if process.poll() is not None:
                return f"process {process.pid}, which has ended"
            stopped = ", stopped by a signal" if process_state(process.pid) == "T" else ""
            return f"process {process.pid}{stopped}"
        machines = os.environ.get("HEADWAY_MACHINES", "").split(",")
        return machines[rank] if rank < len(machines) else ""

    def _too_few(self, attempt: Attempt, text: str) -> Exception:
        logs = attempt.folder.logs
        if self._all_ended():
            log = max(logs.glob("n*.log"), key=lambda path: path.stat().st_mtime)
            return WorkerError(f"the agents of all nodes have ended: {log_tail(log, 3)}", hint=f"see {logs}")
        hint = f"start them, or raise train.join_s; their logs are in {logs}"
        return WorkerError(text, hint=hint) if attempt.source is None else TooFewNodes(text)

    def place_ranks(self, workers: int) -> bool:
        """Place each rank on a node, consecutive ranks together; False where there are not enough slots."""
        slots = [member for member in self.nodes.able() for _ in range(member.slots)]
        if len(slots) < workers:
            return False
        self.memory.place(dict(enumerate(slots[:workers])))
        self._channels, self._pids, self._states = {}, {}, {}
        self._exits.clear()
        self.lost_nodes = []
        self._began_with = frozenset(name for name, member in self.nodes.members.items() if not member.apart)
        return True

    def node(self, rank: int) -> Member:
        """The node of a rank."""
        return self.memory.placement[rank]

    # -- an attempt

    def assign_initializer(self, attempt: Attempt) -> None:
        """Have the node of rank 0 initialize the weights; it must see the run folder."""
        if self.node(0).apart:
            raise WorkerError(
                "custom weights are initialized where the run folder is, and no node is there",
                hint="headway agent --run RUN on the machine that has it",
            )
        self.assign(make_assignment(attempt, 0, draw=True))

    def fork(self, count: int) -> None:
        """Have spares on every node, as many as it has slots."""
        for member in self.nodes.able():
            member.send("spares", count=member.slots)

    def survey(self) -> None:
        """Poll every node; those that do not answer are lost."""
        self.nodes.survey()

    def assign_all(self, attempt: Attempt, state: StateFiles | None) -> Iterator[tuple[int, MessageChannel]]:
        """Give every rank its assignment; the state to resume from is read from the nodes, or from the disk."""
        first = self.node(0)
        for member in self.memory.homes():
            if self.nodes.members.get(member.name) is not member:
                raise NodeLost(f"node {member.name} was lost before its workers started")
        try:
            rendezvous = f"tcp://{first.host}:{self.nodes.request(first, 'port')['port']}"
        except StateError as error:
            raise NodeLost(error.message) from None
        if state is not None:
            table = self.memory.table(state)
            for member in self.memory.homes():
                member.send("state", step=state.step, manifest=state.manifest.decode(), files=table)
        elif attempt.checkpoint is not None and not is_in_store(attempt.checkpoint):
            self._publish(Path(attempt.checkpoint))
        ranks = range(attempt.workers)
        for rank in ranks:
            first_rank = next(other for other in ranks if self.node(other) is self.node(rank))
            yield rank, self.assign(make_assignment(attempt, rank, first_rank=first_rank, rendezvous=rendezvous))

    def _publish(self, checkpoint: Path) -> None:
        """Have nodes that do not see the run folder read the checkpoint to resume from."""
        apart = [member for member in self.memory.homes() if member.apart]
        if apart:
            step, manifest, files = self._folder_server.publish(checkpoint)
            for member in apart:
                member.send("state", step=step, manifest=manifest.decode(), disk=True, files=files)

    def assign(self, assignment: Assignment) -> RemoteChannel:
        """Have a rank's node start its worker; return the channel to it."""
        rank = assignment.rank
        channel = RemoteChannel(rank, self.node(rank), lambda number: self.memory.freed(rank, number))
        self._channels[rank] = channel
        self.node(rank).send("assign", assignment=assignment.model_dump(mode="json"))
        return channel

    def poll(self) -> list[WorkerExit]:
        """Process what nodes have reported; return the workers that have ended."""
        self.nodes.poll()
        exits = list(self._exits)
        self._exits.clear()
        return exits

    def attend(self) -> None:
        """Process what nodes have reported; notice which joined and which are lost."""
        self.nodes.poll()

    def filenos(self) -> list[int]:
        """Descriptors to select on."""
        return self.nodes.filenos()

    def pids(self) -> dict[int, int]:
        """Process ids of live workers by rank, as their nodes number them."""
        return dict(self._pids)

    def state(self, rank: int) -> str:
        """The kernel's letter for a worker's state."""
        return self._states.get(rank, "")

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to workers, all or some."""
        for member in list(self.nodes.members.values()):
            placed = [rank for rank, home in self.memory.placement.items() if home is member]
            targets = [rank for rank in placed if ranks is None or rank in ranks]
            if targets:
                member.send("signal", number=int(number), ranks=targets)

    def stacks(self, folder: Path, attempt: int, native: bool = True) -> StackDump:
        """The stacks of all workers."""
        stacks = list[WorkerStack]()
        path = None
        for member in self.memory.homes():
            if self.nodes.now() - member.last_seen > ALIVE_S:
                continue  # it may be gone; do not wait to find out
            with contextlib.suppress(StateError):
                request = {"folder": str(folder), "attempt": attempt, "native": native}
                answer = self.nodes.request(member, "stacks", **request)
                path = _stacks_file(folder, attempt, member, answer) or path
                stacks += [_worker_stack(fields) for fields in answer["seen"]]
        known = {stack.rank for stack in stacks}
        return StackDump(
            path, stacks + [WorkerStack(rank, 0, "") for rank in self.memory.placement if rank not in known]
        )

    def hold(self) -> None:
        """Another leader starts workers anew: there is nothing to hold."""

    def release(self) -> None:
        """Another leader starts workers anew: there is nothing to release."""

    def dismiss(self) -> None:
        """End all workers at once; spares stay."""
        self.nodes.broadcast("dismiss")

    # -- what nodes report

    def _receive(self, member: Member, message: Message) -> None:
        fields, rank = message.fields, message.fields.get("rank", -1)
        if message.kind == "ready":
            member.ready = True
        elif message.kind == "warned":
            self.preempted = True
        elif message.kind == "pulses":
            self._show(member, fields)
        elif self.memory.placement.get(rank) is not member:
            return  # of an earlier attempt
        elif message.kind == "worker":
            self._pids[rank] = fields["pid"]
        elif message.kind == "exit" and not self._has_ended(rank):
            self._exit(rank, fields["pid"], fields["code"])
        elif message.kind == "from":
            if fields["said"] == "filled":
                self.memory.filled(rank, fields["fields"])
            self._channels[rank].messages.append(Message(fields["said"], fields["fields"]))
        elif message.kind == "gone" and rank in self._channels:
            self._channels[rank].gone = True

    def _show(self, member: Member, fields: Mapping[str, Any]) -> None:
        pages, placement = self._heartbeats, self.memory.placement
        for rank, page in fields["pages"].items():
            if pages is not None and int(rank) < pages.workers and placement.get(int(rank)) is member:
                pages.page(int(rank))[:] = base64.b64decode(page)
        self._states |= {int(rank): state for rank, state in fields["states"].items()}

    def _lose(self, member: Member, how: str) -> None:
        """A node was lost, and its workers with it."""
        placed = [rank for rank, home in self.memory.placement.items() if home is member]
        ranks = [rank for rank in placed if not self._has_ended(rank)]
        if ranks:
            self.lost_nodes.append((member.name, how))
        else:
            self.node_events.append(
                NodeEvent(member.name, "lost", f"node {member.name}, without workers, was lost: {how}")
            )
        for rank in ranks:
            self._exit(rank, self._pids.get(rank, 0), KILLED)

    def _note_silence(self, member: Member, silent_s: float) -> None:
        """A node's agent is silent, or is heard again."""
        if not member.silent:
            text = f"node {member.name}: its agent is heard again after {silent_s:.1f} s"
            self.node_events.append(NodeEvent(member.name, "heard", text))
            return
        machine = "" if member.machine == member.name else f" on {member.machine}"
        stopped = any(process.pid == member.pid for process in self.processes) and process_state(member.pid) == "T"
        how = "is stopped by a signal and " if stopped else ""
        text = (
            f"node {member.name}: its agent (process {member.pid}{machine}) {how}has sent nothing for {silent_s:.1f} s"
        )
        self.node_events.append(NodeEvent(member.name, "silent", text))

    def _exit(self, rank: int, pid: int, code: int) -> None:
        self._exits.append(WorkerExit(rank, pid, code))
        self._pids.pop(rank, None)
        self._channels[rank].gone = True

    def _has_ended(self, rank: int) -> bool:
        return rank not in self._channels or (self._channels[rank].gone and rank not in self._pids)

    # -- nodes that leave on request

    def _answer_leave(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decide whether a node may leave; the same request again (`again`) says whether it is still here."""
        members, name, attempt = self.nodes.members, request.get("node"), self._attempt
        if not isinstance(name, str):
            name, problem = node_of_machine(str(request.get("machine", "")), members)
            if name is None:
                return {"error": problem, "nodes": sorted(members)}
        if (member := members.get(name)) is None and request.get("again"):
            return {"state": "left", "node": name}
        if member is None or attempt is None:
            problem = f"this run has no node {name!r}" if member is None else "the run is only starting"
            return {"error": problem, "nodes": sorted(members)}
        effect = self._leave_effects.get(name)
        if not member.leaving or effect is None:
            capacity = self.capacity(read_recipe(attempt.folder), attempt, attempt.workers)
            effect = effect_of_leaving(capacity, name, has_workers=member in self.memory.homes())
            if effect.refused:
                return {"error": effect.text, "nodes": sorted(members)}
            if name == self.nodes.lease.lead:
                processes = (member.pid, os.getppid(), os.getpid())
                return {"error": leader_stays(name, member.machine, processes), "nodes": sorted(members)}
            member.leaving, self._leave_effects[name] = True, effect
            self.node_events.append(NodeEvent(name, "leaving", f"node {name} was asked to leave; {effect.text}"))
        return {"state": "leaving", "node": name, "workers": effect.workers, "text": effect.text}

    def leaving_with_workers(self) -> tuple[str, ...]:
        """Nodes that were asked to leave and still have workers."""
        return tuple(member.name for member in self.memory.homes() if member.leaving)

    def let_leave(self) -> None:
        """Let nodes go that were asked to leave and have no workers any more."""
        homes = self.memory.homes()
        for member in list(self.nodes.members.values()):
            if member.leaving and member not in homes:
                self.node_events.append(NodeEvent(member.name, "left", f"node {member.name} left on request"))
                self.nodes.dismiss(member)

    # -- after a failed attempt, or under another leader

    has_workers = False

    def adopt(self) -> Mapping[int, MessageChannel]:
        """Workers end with their leader."""
        return {}

    def restart(self, attempt: Attempt, avoid: str, why: str, zygote_died: bool) -> None:
        """Take the lease of the next attempt; a suspect machine gets no workers, now and when an engine restarts."""
        member = self.nodes.members.get(avoid)
        if member is not None:
            self.nodes.suspects[member.machine] = why
            if attempt.host is not None:
                note_suspect(attempt.folder, member.machine, f"{why}, in {SUSPECT} attempts in a row", time.time())
        self.nodes.claim()

    @property
    def minority(self) -> bool:
        """Whether fewer than half are left of the nodes that this attempt began with and that could lead."""
        return 2 * sum(name in self.nodes.members for name in self._began_with) < len(self._began_with)

    def heard_at(self) -> float:
        """When the node that has been silent for longest was last heard."""
        return min((self.node(rank).last_seen for rank in self._pids), default=float("inf"))

    def slots(self, joined_for_s: float) -> int:
        """Workers that fit on nodes that joined at least so long ago."""
        now = time.monotonic()
        return sum(member.slots for member in self.nodes.able() if now - member.joined > joined_for_s)

    def node_of(self, failure: Failure) -> str:
        """The node where a failure happened, if it is known."""
        if failure.cause == "lost":
            return failure.place
        return self.node(failure.rank).name if failure.rank is not None else ""

    def capacity(self, recipe: Recipe, attempt: Attempt, wanted: int) -> NodeCapacity:
        """How many workers the nodes that are left can have, and with how many this run could resume."""
        able = tuple((member.name, member.slots) for member in self.nodes.able())
        counts = tuple(count for count in range(1, wanted + 1) if mesh_can_run(recipe, count))
        return NodeCapacity(attempt.workers, able, counts, min(recipe.train.fewest_workers, wanted))

    def finish(self, exit_status: int) -> None:
        """The run is over: what nodes exit with."""
        self._exit_status = exit_status

    def close(self) -> None:
        """Have nodes exit; where another agent leads, they call that one."""
        self.nodes.close(self._exit_status)


def _stacks_file(folder: Path, attempt: int, member: Member, answer: Mapping[str, Any]) -> Path | None:
    """The file with a node's stacks in the run folder; written here where the node does not see that."""
    if not member.apart or not answer["path"]:
        return Path(answer["path"]) if answer["path"] else None
    path = folder / f"{attempt:04d}-{member.name}-{Path(answer['path']).stem[:40]}.txt"
    try:
        folder.mkdir(exist_ok=True)
        path.write_text(str(answer.get("text", "")), errors="replace")
    except OSError:
        return None
    return path


def _worker_stack(fields: dict[str, Any]) -> WorkerStack:
    frames = tuple(Frame(**frame) for frame in fields.pop("frames"))
    return WorkerStack(**fields | {"frames": frames, "missing": tuple(fields["missing"])})
