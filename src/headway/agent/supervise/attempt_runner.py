"""One attempt of a run: start the workers, assign ranks, watch them to the end, explain how it ended.

Nothing here touches a tensor: workers are forked by a zygote, record events in the run folder, mark their progress in
shared memory, leave their state in the agent's memory, and are stopped by a signal.
"""

import contextlib
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.launch.mesh_checks import mesh_can_run
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.supervise.failures import collateral_ranks, last_step
from headway.agent.supervise.outcome import (
    AttemptEnd,
    AttemptOutcome,
    collect_evidence,
    explain_exit,
    left_on_request,
    out_of_memory_kills,
)
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.supervise.storage_monitor import StorageReporter
from headway.agent.supervise.worker_monitor import WorkerMonitor
from headway.agent.workers.workers import NodeLost, TooFewNodes, Workers
from headway.agent.workers.zygote import ZygoteDied, log_tail
from headway.errors import USAGE_TYPES, HeadwayError, WorkerError
from headway.state import list_checkpoints
from headway.state.address import open_address
from headway.track import Recorder, RunFolder, read_recipe, read_record, record_path, run_id
from headway.track.carried_records import parse_records
from headway.track.heartbeat import UnrecordedWorker

POLL_S = 0.15
ALIVE_S = 1.0
SUSPENDED_S = 2.0
"""An agent that was suspended or starved for so long records it."""
SETTLED_S = 5.0
"""How long a node must have been there before workers are moved to it."""
LAST_WORDS_S = 1.0
"""How long the others may still report after the first worker failed."""


class _StoppedEarly(Exception):
    """A stop was requested before there was a worker to tell."""


@dataclass
class AgentContext:
    """What an agent has from its start to its end."""

    stop_signals: StopSignals
    workers: Workers
    saves: SaveCoordinator
    monitor: WorkerMonitor
    fd_store: FdStore
    on_tick: Callable[[], None]
    wanted: int
    """Workers that were asked for, of which some may have been lost."""
    recorder: Recorder
    """Of the current attempt."""
    reporter: StorageReporter
    outage_s: float
    """How long to continue without records, and to wait for the run's folder where nothing can be done without it."""
    outage: str | None = None
    """The failure of the storage for which the run stops."""
    retry_s: float = 0.0
    """How long the last save is tried."""
    _last: float = field(default_factory=time.monotonic)
    _signed: float = 0.0
    _unrecorded: UnrecordedWorker | None = None

    @property
    def last_words(self) -> str | None:
        """What the run does about storage that has failed for too long."""
        if self.outage is None:
            return None
        return f"{self.outage}: saving where it can, trying for {self.retry_s:.0f} s, and stopping"

    def tick(self) -> None:
        """Called again and again; records every second that it is alive, so that a killed agent's time counts."""
        now = time.monotonic()
        if now - self._last > SUSPENDED_S:
            suspended_s = now - self._last
            self.recorder.event("woken", text=f"the agent was suspended for {suspended_s:.1f} s; training continued")
        if now - self._signed >= ALIVE_S:
            self._signed = now
            self.recorder.event("alive")
        self._last = now
        if ranks := self.workers.pids():  # else they have ended, and what they could not write is still not written
            self._unrecorded = self.monitor.pulses.unrecorded(ranks)
        worker = self._unrecorded
        self.reporter.attend(self.recorder, self.monitor.step, worker, self.last_words)
        if self.outage is None and not self.stop_signals.asked and self.reporter.has_lasted():
            trouble = self.recorder.trouble or (worker and worker.text)
            self.outage = f"records could not be written for {self.outage_s:.0f} s ({trouble})"
            self.stop_signals.asked = 1
        self.workers.attend()
        for event in self.workers.node_events:
            self.recorder.event("node", node=event.node, state=event.state, text=event.text)
        self.workers.node_events.clear()
        if self.workers.preempted:
            self.stop_signals.asked = max(self.stop_signals.asked, 1)
        if not self.fd_store.keep_alive() and not self.stop_signals.asked:
            # Whoever killed the launcher wanted the run to end.
            self.stop_signals.asked = 1
            self.recorder.event("alone", text="the command that runs it was killed: saving and stopping")
        self.on_tick()

    def wait_for_storage(self) -> str | None:
        """Wait while the folder is gone or full; return what is wrong after `outage_s` of it, or when asked to stop."""
        while (trouble := self.reporter.trouble(self.recorder)) is not None:
            if self.reporter.lasted_s() > self.outage_s or self.stop_signals.asked:
                return trouble
            time.sleep(POLL_S)
            self.tick()
        return None

    def tick_unless_stopped(self) -> None:
        """The same before there are workers; raise where a stop is requested."""
        self.tick()
        if self.stop_signals.asked:
            raise _StoppedEarly


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended."""

    outcome: AttemptOutcome
    end: AttemptEnd
    failure: Failure | None = None


def run_attempt(attempt: Attempt, agent: AgentContext) -> AttemptResult:
    """Run one attempt, from the first process to the record of its end."""
    run, workers, saves, recorder = attempt.folder, agent.workers, agent.saves, agent.recorder
    end, resume = AttemptEnd(), run.command("resume")
    kills_before = out_of_memory_kills()
    try:
        if not workers.has_workers:
            _start(attempt, agent)
        # 3 watch them to the end
        _watch_workers(attempt, agent, end)
        end.lost_nodes = list(workers.lost_nodes)
        if end.first_failure is not None:  # what explains it is read from the folder
            agent.wait_for_storage()
        end.bystanders |= collateral_ranks(attempt)
        recorder.event("begin", name="shutdown")
        saves.end()
        workers.release()
        # 4 make the last state durable
        if end.first_failure is None:
            with recorder.span("checkpoint"):
                saves.finish(agent.tick, lambda: agent.stop_signals.asked >= 2, POLL_S)
        # 5 explain how it ended
        end.killed_for_memory = out_of_memory_kills() > kills_before
        stops = agent.stop_signals.asked
        evidence = collect_evidence(run, attempt.number, end, stops, saves.unsaved)
        outcome = explain_exit(replace(evidence, uploaded=saves.uploaded, outage=agent.outage))
        if saves.not_uploaded is not None and outcome.state != "failed":
            outcome = replace(outcome, reason=f"{outcome.reason}; not uploaded: {saves.not_uploaded.message}")
        if outcome.state == "stopped" and end.leaving and not stops:
            reached = max(saves.memory.step, last_step(run, attempt))
            what = left_on_request(end.leaving)
            return AttemptResult(outcome, end, Failure("left", what, reached + 1, reached, at=time.time()))
        return AttemptResult(outcome, end)
    except _StoppedEarly:
        return AttemptResult(AttemptOutcome("stopped", "stopped on request before the first step", resume), end)
    except NodeLost as error:
        saves.end()
        what, reached = str(error), attempt.from_step
        failure = Failure("lost", what, reached + 1, reached, at=time.time())
        return AttemptResult(AttemptOutcome("failed", what, resume), end, failure)
    except TooFewNodes as error:
        saves.end()
        emergency_save(run, agent)
        return AttemptResult(AttemptOutcome("stopped", str(error), resume), end)
    except HeadwayError as error:
        end.zygote_died = isinstance(error, ZygoteDied)
        saves.end()
        return AttemptResult(AttemptOutcome("failed", error.message, error.hint, error.usage), end)
    finally:
        workers.dismiss()
        shutil.rmtree(run.rendezvous, ignore_errors=True)


def _start(attempt: Attempt, agent: AgentContext) -> None:
    """Start the workers and give each its assignment."""
    run, workers, saves, recorder = attempt.folder, agent.workers, agent.saves, agent.recorder
    saves.start(attempt.number, attempt.workers, recorder, read_recipe(run))
    recorder.event(
        "attempt",
        workers=attempt.workers,
        device=attempt.device,
        from_step=attempt.from_step,
        recipe_changes=attempt.recipe_changes,
        source=attempt.source,
        **_node_fields(attempt),
    )
    run.rendezvous.mkdir(exist_ok=True)
    with recorder.span("startup"):
        # 1 import torch once per machine, and have a slot for every rank
        workers.gather(attempt, agent.monitor.pulses, recorder, agent.tick_unless_stopped)
        # 2 fork the workers; those of a custom model need its first weights
        if read_recipe(run).model.class_ is not None and not list_checkpoints(run.initial):
            _initialize_weights(attempt, agent)
        workers.fork(attempt.workers)
        agent.monitor.begin()
        workers.survey()
        state = saves.memory.state_files() if attempt.from_memory else None
        if attempt.from_memory and (state is None or state.step != attempt.from_step):
            raise NodeLost(f"the state of step {attempt.from_step} in memory was lost with a node")
        if attempt.checkpoint is not None and attempt.number > 1:
            with contextlib.suppress(HeadwayError):  # a damaged one, which workers report
                saves.restore_records(parse_records(run_id(run), open_address(attempt.checkpoint).manifest.extra))
        for rank, channel in workers.assign_all(attempt, state):
            saves.listen(rank, channel)


def _node_fields(attempt: Attempt) -> dict[str, int | bool]:
    """What the record says of several nodes."""
    if not attempt.multi_node:
        return {}
    return {"nodes": attempt.nodes, "spares": attempt.spares, "emulated": attempt.host is None}


def _watch_workers(attempt: Attempt, agent: AgentContext, end: AttemptEnd) -> None:
    """Until every worker has ended: poll exits and saves, forward stops, look for hangs, end all when one failed."""
    workers, saves, deadline, forwarded, held = agent.workers, agent.saves, None, 0, False
    known = dict[int, int]()
    while len(end.exits) < attempt.workers:
        descriptors = [*workers.filenos(), *(channel.fileno() for channel in saves.channels())]
        select.select([number for number in descriptors if number >= 0], [], [], POLL_S)  # a lost node's is -1
        for exited in workers.poll():
            end.exits.append(exited)
            agent.recorder.event("exit", rank=exited.rank, code=exited.code)
        for rank, pid in workers.pids().items():
            if known.get(rank) != pid:
                known[rank] = pid
                agent.recorder.event("worker", rank=rank, pid=pid)
        saves.poll()
        if not held and saves.steady and len(known) == attempt.workers and not end.exits:
            held = True
            workers.hold()
            workers.fork(attempt.workers)  # spares, for a restart
        if held:
            workers.let_leave()  # the state that they held has been read
        agent.tick()
        forwarded = _forward_stops(attempt, agent, forwarded)
        if not end.leaving and not end.exits and len(workers.pids()) == attempt.workers:
            end.leaving = workers.leaving_with_workers()
            if end.leaving:
                workers.signal(signal.SIGTERM)  # save and stop, to be started again on the other nodes
        if attempt.workers < agent.wanted and not end.exits and not end.room and not agent.stop_signals.asked:
            end.room = _more_room(attempt, agent)
            if end.room:
                _end_workers(workers, end)
        hang = None if end.exits or end.hang else agent.monitor.look(attempt, workers, agent.recorder)
        if hang is not None:
            end.hang = hang
            _end_workers(workers, end)
        if end.first_failure and deadline is None:
            deadline = time.monotonic() + LAST_WORDS_S
        if deadline is not None and time.monotonic() > deadline:
            _end_workers(workers, end)


def _more_room(attempt: Attempt, agent: AgentContext) -> int:
    """With how many workers a run that lost some could resume, once nothing is lost by it; 0 for no more."""
    memory, room = agent.saves.memory, agent.workers.slots(SETTLED_S)
    if room <= attempt.workers or memory.replicated is not memory.newest or memory.step <= attempt.from_step:
        return 0
    recipe = read_recipe(attempt.folder)
    counts = range(min(room, agent.wanted), attempt.workers, -1)
    return next((count for count in counts if mesh_can_run(recipe, count)), 0)


def _end_workers(workers: Workers, end: AttemptEnd) -> None:
    """End all workers that are left; none of them is to blame."""
    end.bystanders |= set(workers.pids())
    workers.signal(signal.SIGKILL)


def _forward_stops(attempt: Attempt, agent: AgentContext, forwarded: int) -> int:
    """A stop requested before all workers exist waits for the last of them."""
    asked = agent.stop_signals.asked
    if asked == forwarded:
        return forwarded
    if asked >= 2:
        agent.workers.signal(signal.SIGKILL)
        return forwarded
    if len(agent.workers.pids()) < attempt.workers:
        return forwarded
    agent.workers.signal(signal.SIGTERM)
    return asked


def emergency_save(run: RunFolder, agent: AgentContext, upload: bool = False) -> None:
    """Before a run fails for good, write the state that is in memory as a checkpoint; `upload` it too if asked to."""
    with agent.recorder.span("checkpoint"):
        agent.saves.finish(agent.tick, lambda: agent.stop_signals.asked >= 2, POLL_S)
        agent.saves.rescue(list_checkpoints(run.checkpoints), upload)
        agent.saves.finish(agent.tick, lambda: agent.stop_signals.asked >= 2, POLL_S)


# -- the first weights of a custom model


def _initialize_weights(attempt: Attempt, agent: AgentContext) -> None:
    """Have a process of its own initialize the weights, before there are workers; raise what it could not."""
    workers, stop_signals = agent.workers, agent.stop_signals
    workers.fork(1)
    workers.assign_initializer(attempt)
    code = None
    while code is None:
        select.select(workers.filenos(), [], [], POLL_S)
        code = next((exited.code for exited in workers.poll()), None)
        agent.tick()
        if stop_signals.asked:
            workers.signal(signal.SIGKILL)  # it leaves nothing or all
    if stop_signals.asked:
        raise _StoppedEarly
    if code:
        raise _initialization_error(attempt.folder, attempt.number, code)


def _initialization_error(run: RunFolder, attempt: int, code: int) -> WorkerError:
    """The error that the process recorded before it ended, or how it ended."""
    record, log = record_path(run.events, attempt, "draw"), run.logs / f"{attempt:04d}-draw.log"
    hint = f"{run.command('logs')} shows all of its log"
    for event in reversed(read_record(record).events if record.exists() else []):
        if event["kind"] == "error":
            return WorkerError(event["message"], hint=event["hint"] or hint, usage=event["type"] in USAGE_TYPES)
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return WorkerError(f"weight initialization {how}; the end of its log: {log_tail(log, 3)}", hint=hint)
