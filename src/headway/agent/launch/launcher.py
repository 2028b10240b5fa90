"""The launcher: the small process that the user started. It starts the agent and restarts it if it dies.

    launcher (shows the view, takes Ctrl-C)
      agent (`python -m headway.agent`: watches, saves, recovers)
        zygote
          workers

The launcher knows nothing of training. It holds a duplicate of every memory and channel descriptor of the agent
(agent/fd_store.py) and hands them to the next one, so that workers and snapshots survive the agent. It continues a
stopped agent and kills a silent one. If the launcher dies, the agent has the run save and stop; if both die, the zygote
sees its channel close and ends the workers.
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
from pathlib import Path
from typing import BinaryIO

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdEntry, FdReassembler, send_chunked
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.stop_signals import count_stop_signals
from headway.errors import RunError
from headway.state import Channel, ChannelClosed, Message
from headway.track import Recorder, RunFolder, next_attempt, record_path
from headway.track.access import umask_of
from headway.track.process_state import process_state

POLL_S = 0.25
STOPPED_S = 2.0
"""An agent that a signal has stopped for this long is continued."""
SILENT_S = 120.0
"""An agent that sends nothing for this long hangs. It may be busy preparing many gigabytes of memory."""
MAX_EARLY_DEATHS, HEALTHY_S = 5, 10.0
"""Give up after this many agents in a row that died before their first message or within these seconds of it."""
REAP_S = 10.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Agent:
    """An agent as its launcher knows it."""

    pid: int
    channel: Channel
    started: float
    last_message: float
    ready: bool = False
    """Whether it has sent a message."""
    outcome: AttemptOutcome | None = None
    reassembler: FdReassembler = field(default_factory=FdReassembler)


def run_launcher(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    on_storage: Callable[[str | None, int], None] = lambda _trouble, _step: None,
    inherited: Mapping[str, FdEntry] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AttemptOutcome:
    """Have an agent run an attempt to the run's end, and start another if it dies; `on_tick` as in `supervise_run`.

    `on_storage` is called with what is wrong with the run's folder, or None, and the step reached.
    `inherited` is the fd store of an agent elsewhere, from which the first one continues. `clock` measures how long an
    agent has been silent and how long it has lived.
    """
    entries, forwarded, deaths = dict(inherited or {}), 0, 0
    with umask_of(attempt.run), count_stop_signals() as stop_signals, _all_children() as reap, _closing(entries):
        agent = _start(attempt, entries, clock())
        while True:
            # 1 the agent's messages, and whether it is alive
            select.select([agent.channel.fileno()], [], [], POLL_S)
            exits = reap()  # before the last messages are received, which are sent before the exit
            connected = _receive(agent, entries, clock(), on_storage)
            if agent.outcome is not None and agent.pid in exits:
                agent.channel.close()
                on_tick(stop_signals.asked)
                return agent.outcome
            # 2 another agent if it is not
            if agent.outcome is None and (agent.pid in exits or not connected):
                deaths = 0 if agent.ready and clock() - agent.started > HEALTHY_S else deaths + 1
                _signal(agent.pid, signal.SIGKILL)
                agent.channel.close()
                if stop_signals.asked >= 2 or deaths == MAX_EARLY_DEATHS:
                    return _give_up(attempt.folder, reap().get(agent.pid), stop_signals.asked)
                agent, forwarded = _start(attempt, entries, clock()), 0
            # 3 forward stop requests; before its first message the agent would die of the signal
            if stop_signals.asked > forwarded and agent.ready:
                # The first as SIGUSR1, which never hurries: batch systems signal the agent too, not only its launcher.
                _signal(agent.pid, signal.SIGTERM if forwarded else signal.SIGUSR1)
                forwarded += 1
            # 4 continue a stopped agent, kill one that hangs
            silent_s = clock() - agent.last_message
            if silent_s > STOPPED_S and process_state(agent.pid) == "T":
                _signal(agent.pid, signal.SIGCONT)
            elif silent_s > SILENT_S:
                _signal(agent.pid, signal.SIGKILL)
            on_tick(stop_signals.asked)


@contextlib.contextmanager
def _closing(entries: dict[str, FdEntry]) -> Iterator[None]:
    try:
        yield
    finally:
        for name in list(entries):
            _drop(entries, name)


def _start(attempt: Attempt, entries: dict[str, FdEntry], now: float) -> _Agent:
    """Start an agent in a session of its own and hand it everything that the last one stored."""
    run = attempt.folder
    channel, agent_end = Channel.pair()
    with contextlib.closing(agent_end), _open_log(run.logs / f"{attempt.number:04d}-agent.log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.agent", str(agent_end.fileno()), str(run.path)],
            pass_fds=[agent_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # reaped with all other children
    with contextlib.suppress(ChannelClosed):
        for name, entry in entries.items():
            send_chunked(channel, "keep", entry.descriptors, name=name, fields=entry.fields)
        channel.send("go", attempt=attempt.model_dump(mode="json"))
    return _Agent(process.pid, channel, started=now, last_message=now)


def _open_log(path: Path) -> BinaryIO:
    """Open an agent's log; the null device where the run's folder is gone, so that a dead agent is replaced anyway."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    return Path(os.devnull).open("ab")


def _receive(
    agent: _Agent, entries: dict[str, FdEntry], now: float, on_storage: Callable[[str | None, int], None]
) -> bool:
    """Process the agent's messages; return False if its channel is closed."""
    try:
        messages = agent.channel.receive()
    except ChannelClosed:
        return False
    for chunk in messages:
        agent.last_message = now
        if not agent.ready:
            agent.started, agent.ready = now, True
        match agent.reassembler.join(chunk):
            case Message("keep", fields, descriptors):
                _drop(entries, fields["name"])
                entries[fields["name"]] = FdEntry(fields["fields"], tuple(descriptors))
            case Message("drop", fields):
                _drop(entries, fields["name"])
            case Message("storage", fields):
                on_storage(fields["trouble"], fields["step"])
            case Message("outcome", fields):
                agent.outcome = AttemptOutcome(**fields)
    return True


def _drop(entries: dict[str, FdEntry], name: str) -> None:
    entry = entries.pop(name, None)
    for descriptor in entry.descriptors if entry else ():
        os.close(descriptor)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _give_up(run: RunFolder, status: int | None, asked: int) -> AttemptOutcome:
    """Start no other agent, and record the end of the run, which no agent does any more."""
    exit_status = "" if status is None else f" (status {status})"
    reason = f"the agent died {MAX_EARLY_DEATHS} times during start-up{exit_status}"
    outcome = AttemptOutcome("failed", reason, f"its log is in {run.logs}")
    if asked:
        outcome = AttemptOutcome("stopped", "stopped at once on request, state not saved", run.command("resume"))
    attempt = max(1, next_attempt(run) - 1)
    record = record_path(run.events, attempt, "agent")
    with contextlib.suppress(RunError), Recorder(record, attempt=attempt, process="agent") as recorder:
        recorder.event("end", outcome=outcome.state, reason=outcome.reason)
    return outcome


@contextlib.contextmanager
def _all_children() -> Iterator[Callable[[], dict[int, int]]]:
    """Become the parent of the orphans of dead agents; yield a function that returns the exit codes so far by pid."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    exits = dict[int, int]()

    def reap() -> dict[int, int]:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                exits[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return exits

    try:
        yield reap
    finally:
        deadline = time.monotonic() + REAP_S
        while _has_children() and time.monotonic() < deadline:
            reap()
            time.sleep(0.01)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
