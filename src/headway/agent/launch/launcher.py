"""The keeper: a small process that starts the agent, holds what must not be lost with it, starts another if it dies.

    keeper (what the user started: shows the view, takes Ctrl-C)
      agent (`python -m headway.agent`: watches, saves, recovers)
        zygote
          workers

The keeper knows nothing of training. It has a second descriptor of every piece of memory and of every line that the
agent has (agent/fd_store.py), so that neither workers nor states notice when the agent is gone, and hands them to the next one.
An agent that was stopped is woken; one that says nothing for long is ended. If the keeper dies, the agent has the run
save and stop; if both die, the zygote finds its line closed and ends the workers.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdEntry, FdReassembler, send_chunked
from headway.agent.supervise.hang_detector import process_state
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.stop_signals import StopSignals, count_stop_signals
from headway.state import Channel, ChannelClosed, Message
from headway.track import Recorder, RunFolder, next_attempt, record_path

__all__ = ["run_launcher"]

POLL_S = 0.25
STOPPED_S = 2.0
"""An agent that is stopped by a signal for so long is woken."""
SILENT_S = 120.0
"""One that does not say anything for so long hangs. It may be busy making memory of many gigabytes ready."""
LIVES, WELL_S = 5, 10.0
"""So many agents in a row that die before their first word or within so many seconds of it: another would die too."""
LAST_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Agent:
    """An agent as its keeper knows it."""

    pid: int
    line: Channel
    began: float
    heard: float
    spoke: bool = False
    outcome: AttemptOutcome | None = None
    parts: FdReassembler = field(default_factory=FdReassembler)


def run_launcher(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    left: Mapping[str, FdEntry] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AttemptOutcome:
    """Have an agent run an attempt to the run's end, and another when it dies; `on_tick` as in `supervise`.

    `left` is what an agent elsewhere has left, which the first one goes on with. `clock` tells how long an agent has
    been silent and how long it has lived.
    """
    things = dict(left or {})
    with count_stop_signals() as wishes, _all_children() as reap:
        agent = _start(attempt, things, clock())
        try:
            return _keep(attempt, agent, things, wishes, reap, lambda: on_tick(wishes.asked), clock)
        finally:
            for name in list(things):
                _drop(things, name)


def _keep(
    attempt: Attempt,
    agent: _Agent,
    things: dict[str, FdEntry],
    wishes: StopSignals,
    reap: Callable[[], dict[int, int]],
    tick: Callable[[], None],
    clock: Callable[[], float],
) -> AttemptOutcome:
    passed_on = deaths = 0
    while True:
        # 1 what the agent says, and whether it is there
        select.select([agent.line.fileno()], [], [], POLL_S)
        ends = reap()  # before the last words are heard, which are said before the end
        alive = _hear(agent, things, clock())
        if agent.outcome is not None and agent.pid in ends:
            agent.line.close()
            tick()
            return agent.outcome
        # 2 another one where it is not
        if agent.outcome is None and (agent.pid in ends or not alive):
            deaths = 0 if agent.spoke and clock() - agent.began > WELL_S else deaths + 1
            _end(agent)
            if wishes.asked >= 2 or deaths == LIVES:
                return _give_up(attempt.folder, reap().get(agent.pid), wishes.asked)
            agent, passed_on = _start(attempt, things, clock()), 0
        # 3 pass on what people ask; before it has spoken it would die of the signal
        if wishes.asked > passed_on and agent.spoke:
            # The first wish as SIGUSR1, which never hurries: batch systems tell the agent too, not only its keeper.
            _signal(agent.pid, signal.SIGTERM if passed_on else signal.SIGUSR1)
            passed_on += 1
        _rouse(agent, clock() - agent.heard)
        tick()


def _start(attempt: Attempt, things: dict[str, FdEntry], now: float) -> _Agent:
    """An agent in a session of its own, with everything that the one before has left."""
    run = attempt.folder
    ours, theirs = Channel.pair()
    run.logs.mkdir(exist_ok=True)
    with contextlib.closing(theirs), (run.logs / f"{attempt.number:04d}-agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.agent", str(theirs.fileno()), str(run.path)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # its end is heard of with that of all other children
    with contextlib.suppress(ChannelClosed):
        for name, thing in things.items():
            send_chunked(ours, "keep", thing.descriptors, name=name, fields=thing.fields)
        ours.send("go", attempt=attempt.model_dump(mode="json"))
    return _Agent(process.pid, ours, began=now, heard=now)


def _hear(agent: _Agent, things: dict[str, FdEntry], now: float) -> bool:
    """Take in what the agent says; False when it has hung up."""
    try:
        messages = agent.line.receive()
    except ChannelClosed:
        return False
    for message in messages:
        agent.heard = now
        if not agent.spoke:
            agent.began, agent.spoke = agent.heard, True
        whole = agent.parts.join(message)
        if whole is not None:
            _take(agent, whole, things)
    return True


def _take(agent: _Agent, message: Message, things: dict[str, FdEntry]) -> None:
    match message.kind:
        case "keep":
            _drop(things, message.fields["name"])
            things[message.fields["name"]] = FdEntry(message.fields["fields"], tuple(message.descriptors))
        case "drop":
            _drop(things, message.fields["name"])
        case "outcome":
            agent.outcome = AttemptOutcome(**message.fields)


def _drop(things: dict[str, FdEntry], name: str) -> None:
    thing = things.pop(name, None)
    for descriptor in thing.descriptors if thing else ():
        os.close(descriptor)


def _rouse(agent: _Agent, silent_s: float) -> None:
    """An agent that is silent: wake it if it was stopped, end it if it hangs."""
    if silent_s > STOPPED_S and process_state(agent.pid) == "T":
        _signal(agent.pid, signal.SIGCONT)
    elif silent_s > SILENT_S:
        _signal(agent.pid, signal.SIGKILL)


def _end(agent: _Agent) -> None:
    _signal(agent.pid, signal.SIGKILL)
    agent.line.close()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _give_up(run: RunFolder, status: int | None, asked: int) -> AttemptOutcome:
    """No other agent is started; the record says so, for nobody else will."""
    how = "" if status is None else f" (status {status})"
    reason = f"the agent died {LIVES} times during start-up{how}"
    outcome = AttemptOutcome("failed", reason, f"its log is in {run.logs}")
    if asked:
        outcome = AttemptOutcome("stopped", "stopped at once on request, state not saved", f"headway resume {run.name}")
    attempt = max(1, next_attempt(run) - 1)
    with Recorder(record_path(run.events, attempt, "agent"), attempt=attempt, process="agent") as recorder:
        recorder.event("end", outcome=outcome.state, reason=outcome.reason)
    return outcome


@contextlib.contextmanager
def _all_children() -> Iterator[Callable[[], dict[int, int]]]:
    """Be the parent of whatever a dead agent leaves; gives a function that tells who has ended, and with what."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended = dict[int, int]()

    def reap() -> dict[int, int]:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        return ended

    try:
        yield reap
    finally:
        deadline = time.monotonic() + LAST_S
        while _has_children() and time.monotonic() < deadline:
            reap()
            time.sleep(0.01)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
