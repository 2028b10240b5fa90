"""The zygote: imports torch and the training modules once, then forks workers that need not.

It runs no operation and touches no device, so that nothing exists that a fork cannot inherit (threads, a CUDA context).
Requests arrive over the channel whose descriptor is the first argument: `fork` (id, and the worker's own channel, over
which it gets its assignment, now or later), `list`. Replies: `ready`, `forked` (id, pid) and `exit` (pid, code); a list
repeats those, and ends with `listed` (living). When the agent closes its end, the workers are killed.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headway.state import Channel, ChannelClosed, Message
from headway.state.parent_process import end_with_parent

REMEMBERED = 256
"""Exits that are repeated to a new agent."""


def main(descriptor: int) -> None:
    """Serve until the agent closes the channel."""
    # Batch systems signal all processes of a job; only the agent should react. Workers inherit this. SIGTERM is blocked
    # since before the start (agent/workers/zygote.py), and in workers until they install a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    started = time.monotonic()
    gc.disable()  # imported objects stay: collecting takes a tenth of the import time
    from headway.train import worker

    gc.collect()
    gc.freeze()  # workers share these pages longer
    gc.enable()
    assert threading.active_count() == 1, "a fork would lose the zygote's threads"

    agent = Channel(socket.socket(fileno=descriptor))
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    family = _Family()
    _send(agent, kind="ready", import_s=time.monotonic() - started)
    while True:
        readable, _, _ = select.select([agent, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _report_exits(agent, family)
        if agent in readable:
            try:
                requests = agent.receive()
            except ChannelClosed:
                break
            while requests:
                request = requests.pop(0)
                if request.kind == "list":
                    _list(agent, family)
                else:
                    others = [descriptor for later in requests for descriptor in later.descriptors]
                    _fork(agent, family, request, worker.main, [wake_read, wake_write, *others])
    for pid in family.living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # a regular shutdown of torch would take a third of a second


@dataclass(frozen=True)
class _Family:
    living: dict[int, int] = field(default_factory=dict)
    """Ids of workers by pid."""
    ended: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last exits: pid and code."""


def _fork(agent: Channel, family: _Family, request: Message, work: Any, own_descriptors: list[int]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in request.descriptors:
            os.close(fd)
        family.living[pid] = request.fields["id"]
        _send(agent, kind="forked", id=request.fields["id"], pid=pid)
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in own_descriptors:
            os.close(fd)
        agent.close()
        end_with_parent(signal.SIGKILL, parent)
        (descriptor,) = request.descriptors
        code = work(Channel(socket.socket(fileno=descriptor)))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # A regular exit would run the zygote's exit handlers a second time.
        os._exit(code)


def _list(agent: Channel, family: _Family) -> None:
    """Repeat to a new agent what the previous one may have received."""
    for pid, number in family.living.items():
        _send(agent, kind="forked", id=number, pid=pid)
    for pid, code in family.ended:
        _send(agent, kind="exit", pid=pid, code=code)
    _send(agent, kind="listed", living=len(family.living))


def _report_exits(agent: Channel, family: _Family) -> None:
    while family.living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        del family.living[pid]
        family.ended.append((pid, os.waitstatus_to_exitcode(status)))
        _send(agent, kind="exit", pid=pid, code=family.ended[-1][1])


def _send(agent: Channel, kind: str, **fields: Any) -> None:
    with contextlib.suppress(ChannelClosed):
        agent.send(kind, **fields)


if __name__ == "__main__":
    main(int(sys.argv[1]))
