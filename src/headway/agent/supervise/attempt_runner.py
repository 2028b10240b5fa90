"""One attempt of a run: have workers, tell each what to do, watch them to the end, say how it was.

Nothing here touches a tensor: workers are forked by the zygote, tell their story in the run's event files, mark where
they are in shared memory, leave their state in the agent's memory, and are told to stop by a signal. On one machine the
workers are a Crew, on several a Team: both start, hear and end them in the same words.
"""

import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headway.agent.attempt import Attempt, make_assignment
from headway.agent.fd_store import FdStore
from headway.agent.launch.mesh_checks import mesh_can_run
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.nodes.wait_reporter import WaitReporter
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.saving.restore_points import need_store
from headway.agent.supervise.failures import AttemptEnd, collateral_ranks
from headway.agent.supervise.outcome import AttemptOutcome, explain_exit, out_of_memory_kills
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.zygote import ZygoteDied, log_tail
from headway.errors import HeadwayError, StateError, WorkerError
from headway.state import list_checkpoints
from headway.track import Recorder, RunFolder, read_recipe, read_record, record_path

__all__ = ["POLL_S", "AgentContext", "AttemptResult", "emergency_save", "run_attempt"]


POLL_S = 0.15
SIGN_OF_LIFE_S = 1.0
STOOD_STILL_S = 2.0
"""An agent that was stopped, or held up, for so long says so."""
TOGETHER_S = 20.0
"""How long those that could do without one more wait for it as a run begins."""
FIRST_S = 600.0
"""How long the first node may take to be ready: torch may come from a slow disk that many read at once."""
JOIN_S = 120.0
"""How long the others that an attempt needs may take from then on."""
STAYS_S = 5.0
"""How long a node must have been there before workers are moved to it."""
LAST_WORDS_S = 1.0
"""How long the others may still report after the first worker failed."""


class _StoppedEarly(Exception):
    """A stop was asked for before there was a worker to tell."""


class _LostMeanwhile(Exception):
    """A node was lost before there was a worker on it, perhaps with what the attempt goes on from."""


class _TooFewNodes(Exception):
    """Of a run that has trained already: it is worth starting again once there are enough."""


@dataclass
class AgentContext:
    """What an agent has from its beginning to its end."""

    wishes: StopSignals
    crew: WorkerGroup | NodeGroup
    saves: SaveCoordinator
    lookout: WorkerMonitor
    kept: FdStore
    tick: Callable[[], None]
    wanted: int
    """Workers that were asked for, of which some may have been lost."""
    recorder: Recorder
    """Of the attempt under way."""
    _last: float = field(default_factory=time.monotonic)
    _signed: float = 0.0

    def pulse(self) -> None:
        """Called again and again; writes a sign of life now and then, so that a killed agent's time is not lost."""
        now = time.monotonic()
        if now - self._last > STOOD_STILL_S:
            suspended_s = now - self._last
            self.recorder.event("woken", text=f"the agent was suspended for {suspended_s:.1f} s; training continued")
        if now - self._signed >= SIGN_OF_LIFE_S:
            self._signed = now
            self.recorder.event("alive")
        self._last = now
        self.crew.attend()
        if isinstance(self.crew, NodeGroup) and self.crew.warned:
            self.wishes.asked = max(self.wishes.asked, 1)
        if not self.kept.keep_alive() and not self.wishes.asked:
            # Whoever killed the keeper wanted an end.
            self.wishes.asked = 1
            self.recorder.event("alone", text="the command that runs it was killed: saving and stopping")
        self.tick()


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended."""

    outcome: AttemptOutcome
    ended: AttemptEnd
    failure: Failure | None = None


def run_attempt(attempt: Attempt, agent: AgentContext) -> AttemptResult:
    """One attempt, from the first process to the last word about it."""
    run, saves, recorder, wishes = attempt.folder, agent.saves, agent.recorder, agent.wishes
    ended = AttemptEnd()
    kills_before = out_of_memory_kills()
    try:
        if isinstance(agent.crew, NodeGroup) or agent.crew.empty:
            _start(attempt, agent)
        # 3 watch them to the end
        _watch_workers(attempt, agent, ended)
        ended.lost_nodes = [] if isinstance(agent.crew, WorkerGroup) else list(agent.crew.lost)
        ended.bystanders |= collateral_ranks(attempt)
        recorder.event("begin", name="shutdown")
        saves.end()
        agent.kept.drop("crew")
        # 4 make the last state durable
        if ended.first_failure is None:
            with recorder.span("checkpoint"):
                saves.finish(agent.pulse, lambda: wishes.asked >= 2, POLL_S)
        # 5 say how it ended
        ended.killed_for_memory = out_of_memory_kills() > kills_before
        outcome = explain_exit(run, attempt.number, ended, wishes.asked, saves.unsaved)
        if saves.not_uploaded is not None and outcome.state != "failed":
            outcome = replace(outcome, reason=f"{outcome.reason}; not uploaded: {saves.not_uploaded.message}")
        return AttemptResult(outcome, ended)
    except _StoppedEarly:
        hint = f"headway resume {run.name}"
        return AttemptResult(AttemptOutcome("stopped", "stopped on request before the first step", hint), ended)
    except _LostMeanwhile as error:
        saves.end()
        what, reached = str(error), attempt.from_step
        failure = Failure("lost", what, reached + 1, reached, at=time.time())
        return AttemptResult(AttemptOutcome("failed", what, f"headway resume {run.name}"), ended, failure)
    except _TooFewNodes as error:
        saves.end()
        emergency_save(run, agent)
        return AttemptResult(AttemptOutcome("stopped", str(error), f"headway resume {run.name}"), ended)
    except HeadwayError as error:
        ended.zygote_died = isinstance(error, ZygoteDied)
        saves.end()
        return AttemptResult(AttemptOutcome("failed", error.message, error.hint), ended)
    finally:
        agent.crew.dismiss()
        shutil.rmtree(run.rendezvous, ignore_errors=True)


def _start(attempt: Attempt, agent: AgentContext) -> None:
    """Have workers, and tell each what to do."""
    run, crew, saves, recorder = attempt.folder, agent.crew, agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(run))
    recorder.event(
        "attempt",
        workers=attempt.workers,
        device=attempt.device,
        from_step=attempt.from_step,
        recipe_changes=attempt.recipe_changes,
        source=attempt.source,
        **_on_nodes(attempt),
    )
    run.rendezvous.mkdir(exist_ok=True)
    # 1 import torch once
    with recorder.span("startup"):
        if isinstance(crew, NodeGroup):
            _gather(attempt, agent, crew)
        while isinstance(crew, WorkerGroup) and not crew.ready(POLL_S):
            agent.pulse()
            if agent.wishes.asked:
                raise _StoppedEarly
        # 2 fork the workers; those of a class of the user's own need its first weights
        if _needs_drawing(run):
            _draw(attempt, agent)
        crew.fork(attempt.workers)
        agent.lookout.begin()
        if isinstance(crew, NodeGroup):
            _assign_all(attempt, agent, crew)
            return
        with saves.kept_files(attempt.from_memory) as (memory, files):
            for rank in range(attempt.workers):
                descriptors = [agent.lookout.pulses.descriptor, *memory]
                line = crew.assign(make_assignment(attempt, rank), descriptors, files=files)
                saves.listen(rank, line)


def _on_nodes(attempt: Attempt) -> dict[str, int | bool]:
    """What the record says of several nodes."""
    if not attempt.multi_node:
        return {}
    return {"nodes": attempt.nodes, "spares": attempt.spares, "emulated": attempt.host is None}


def _gather(attempt: Attempt, agent: AgentContext, team: NodeGroup) -> None:
    """Wait until there are nodes for all workers, and give each a place."""
    team.attempt, team.pulses = attempt.number, agent.lookout.pulses
    began = time.monotonic()
    deadline, soon, first = began + FIRST_S, began + FIRST_S, True
    # nodes that were all started at once have their places by name, and not by who was first
    all_of_them = attempt.nodes + attempt.spares if attempt.source is None else 0
    url = need_store(read_recipe(attempt.folder), attempt.run.name) if attempt.apart else ""
    waiting = WaitReporter(attempt, team.right.host, team.right.port, began, url)
    while (len(team.able()) < all_of_them and time.monotonic() < soon) or not team.lay_out(attempt.workers):
        team.listen(POLL_S)
        agent.pulse()
        now = time.monotonic()
        if words := waiting.words(team.members, now):
            agent.recorder.event("waiting", text=words)
        if first and team.able():
            first, deadline, soon = False, now + JOIN_S, now + TOGETHER_S
        if agent.wishes.asked:
            raise _StoppedEarly
        if team.suspects and attempt.source is None and now > soon:
            names = ", ".join(sorted(team.suspects))
            agent.recorder.event("log", message=f"no other machines have come: {names} may have workers again")
            team.suspects = {}
        if team.all_ended() or now > deadline:
            raise _too_few(attempt, team, now - began)


def _too_few(attempt: Attempt, team: NodeGroup, waited_s: float) -> Exception:
    """Why an attempt cannot begin."""
    logs = attempt.folder.logs
    if team.all_ended():
        log = max(logs.glob("n*.log"), key=lambda path: path.stat().st_mtime)
        return WorkerError(f"the agents of all nodes have ended: {log_tail(log, 3)}", hint=f"their logs are in {logs}")
    there = ", ".join(member.name for member in team.able()) or "none"
    told = f"too few nodes for {attempt.workers} workers after {waited_s:.0f} s (joined: {there})"
    return WorkerError(told, hint=f"their logs are in {logs}") if attempt.source is None else _TooFewNodes(told)


def _assign_all(attempt: Attempt, agent: AgentContext, team: NodeGroup) -> None:
    """Tell each worker of a team what to do; the state that they go on from lies with the nodes."""
    lead = team.place(0)
    try:
        meet = f"tcp://{lead.host}:{team.ask(lead, 'port')['port']}"
    except StateError as error:
        raise _LostMeanwhile(error.message) from None
    team.look_around()
    if attempt.from_memory and agent.saves.memory.step != attempt.from_step:
        raise _LostMeanwhile(f"the state of step {attempt.from_step} in memory was lost with a node")
    if attempt.from_memory:
        agent.saves.share(team)
    else:
        team.offer(attempt.checkpoint)
    for rank in range(attempt.workers):
        first = next(one for one in range(attempt.workers) if team.place(one) is team.place(rank))
        line = team.assign(make_assignment(attempt, rank, first_rank=first, rendezvous=meet))
        agent.saves.listen(rank, line)


def _watch_workers(attempt: Attempt, agent: AgentContext, ended: AttemptEnd) -> None:
    """Until every worker has ended: hear exits and saves, pass stops on, look for hangs, end all when one failed."""
    crew, saves, deadline, passed_on, held = agent.crew, agent.saves, None, 0, False
    known = dict[int, int]()
    while len(ended.exits) < attempt.workers:
        ends = [*crew.filenos(), *(line.fileno() for line in saves.lines())]
        select.select([end for end in ends if end >= 0], [], [], POLL_S)  # a lost node's line has none any more
        for one in crew.hear():
            ended.exits.append(one)
            agent.recorder.event("exit", rank=one.rank, code=one.code)
        for rank, pid in crew.pids().items():
            if known.get(rank) != pid:
                known[rank] = pid
                agent.recorder.event("worker", rank=rank, pid=pid)
        saves.hear()
        if not held and saves.steady and len(known) == attempt.workers and not ended.exits:
            held = True
            if isinstance(crew, WorkerGroup):
                crew.keep()
            crew.fork(attempt.workers)  # spares, for a restart
        agent.pulse()
        passed_on = _pass_stops_on(attempt, agent, passed_on)
        if attempt.workers < agent.wanted and not ended.exits and not ended.room and not agent.wishes.asked:
            ended.room = _more_room(attempt, agent)
            if ended.room:
                _end(crew, ended)
        hang = None if ended.exits or ended.hang else agent.lookout.look(attempt, crew, agent.recorder)
        if hang is not None:
            ended.hang = hang
            _end(crew, ended)
        if ended.first_failure and deadline is None:
            deadline = time.monotonic() + LAST_WORDS_S
        if deadline is not None and time.monotonic() > deadline:
            _end(crew, ended)


def _more_room(attempt: Attempt, agent: AgentContext) -> int:
    """With how many workers a run that has lost some could go on, as soon as nothing is lost by it; 0 for no more."""
    team, memory = agent.crew, agent.saves.memory
    if not isinstance(team, NodeGroup) or memory.replicated is not memory.newest or memory.step <= attempt.from_step:
        return 0
    room = sum(one.slots for one in team.able() if time.monotonic() - one.joined > STAYS_S)
    if room <= attempt.workers:
        return 0
    recipe = read_recipe(attempt.folder)
    counts = range(min(room, agent.wanted), attempt.workers, -1)
    return next((count for count in counts if mesh_can_run(recipe, count)), 0)


def _end(crew: WorkerGroup | NodeGroup, ended: AttemptEnd) -> None:
    """End all workers that are left; nothing of it is their fault."""
    ended.bystanders |= set(crew.pids())
    crew.signal(signal.SIGKILL)


def _pass_stops_on(attempt: Attempt, agent: AgentContext, passed_on: int) -> int:
    """A stop asked for before all workers exist waits for the last of them."""
    asked = agent.wishes.asked
    if asked == passed_on:
        return passed_on
    if asked >= 2:
        agent.crew.signal(signal.SIGKILL)
        return passed_on
    if len(agent.crew.pids()) < attempt.workers:
        return passed_on
    agent.crew.signal(signal.SIGTERM)
    return asked


def emergency_save(run: RunFolder, agent: AgentContext) -> None:
    """A run that fails for good leaves what it has: a state in memory becomes a checkpoint."""
    with agent.recorder.span("checkpoint"):
        agent.saves.finish(agent.pulse, lambda: agent.wishes.asked >= 2, POLL_S)
        agent.saves.rescue(list_checkpoints(run.checkpoints))
        agent.saves.finish(agent.pulse, lambda: agent.wishes.asked >= 2, POLL_S)


# -- the first weights of a class of the user's own


def _needs_drawing(run: RunFolder) -> bool:
    return read_recipe(run).model.class_ is not None and not list_checkpoints(run.initial)


def _draw(attempt: Attempt, agent: AgentContext) -> None:
    """Have a process of its own make the first weights, before there are workers; raises what it could not."""
    crew, asked = agent.crew, agent.wishes
    if isinstance(crew, NodeGroup) and crew.place(0).apart:
        raise WorkerError(
            "the first weights are drawn where the run's folder is, and no node is there",
            hint="headway agent --run RUN on the machine that has it",
        )
    crew.fork(1)
    told = make_assignment(attempt, 0, draw=True)
    crew.assign(told) if isinstance(crew, NodeGroup) else crew.assign(told, [])
    code = None
    while code is None:
        select.select(crew.filenos(), [], [], POLL_S)
        code = next((one.code for one in crew.hear()), None)
        agent.pulse()
        if asked.asked:
            crew.signal(signal.SIGKILL)  # it leaves nothing or all
    if asked.asked:
        raise _StoppedEarly
    if code:
        raise _why_not_drawn(attempt.folder, attempt.number, code)


def _why_not_drawn(run: RunFolder, attempt: int, code: int) -> WorkerError:
    """What the drawing process said before it went, or how it went."""
    record, log = record_path(run.events, attempt, "draw"), run.logs / f"{attempt:04d}-draw.log"
    hint = f"headway logs {run.name} shows all of its log"
    for event in reversed(read_record(record).events if record.exists() else []):
        if event["kind"] == "error":
            return WorkerError(event["message"], hint=event["hint"] or hint)
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return WorkerError(f"the process that draws the weights {how}; the end of its log: {log_tail(log, 3)}", hint=hint)
