"""The zygote: imports torch and the modules of a step once, then forks workers that need not.

It runs no operation and touches no device, so that nothing a fork cannot carry over (threads, a CUDA context)
exists yet. Requests (`recipe.Assignment`, and a line of the worker's own) come over the line whose descriptor is the
first argument; `ready`, `forked` and `exit` messages go back. When the agent's end closes, the workers are killed.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from headway.recipe import Assignment
from headway.state import Line, LineClosed, Message

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    """Serve until the agent is gone."""
    started = time.monotonic()
    from headway.train import worker

    gc.collect()
    gc.freeze()  # workers share these pages for longer
    assert threading.active_count() == 1, "a fork would lose the zygote's threads"

    agent = Line(socket.socket(fileno=descriptor))
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # workers inherit this until they can listen
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    ranks = dict[int, int]()  # pid to rank
    _send(agent, kind="ready", import_s=time.monotonic() - started)
    while True:
        readable, _, _ = select.select([agent, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _report_exits(agent, ranks)
        if agent in readable:
            try:
                requests = agent.receive()
            except LineClosed:
                break
            for request in requests:
                _fork(agent, ranks, request, worker.main, (wake_read, wake_write))
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # taking torch apart politely would cost the run a third of a second


def _fork(agent: Line, ranks: dict[int, int], request: Message, work: Any, ours: tuple[int, int]) -> None:
    assignment = Assignment.model_validate(request.fields["assignment"])
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in request.descriptors:
            os.close(fd)
        ranks[pid] = assignment.rank
        _send(agent, kind="forked", rank=assignment.rank, pid=pid)
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in ours:
            os.close(fd)
        agent.close()
        _die_with(parent)
        log = os.open(assignment.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = work(assignment, *(Line(socket.socket(fileno=fd)) for fd in request.descriptors))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Leaving through the interpreter's clean-up would run the zygote's exit handlers a second time.
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the zygote ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _report_exits(agent: Line, ranks: dict[int, int]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _send(agent, kind="exit", rank=ranks.pop(pid), pid=pid, code=os.waitstatus_to_exitcode(status))


def _send(agent: Line, kind: str, **fields: Any) -> None:
    with contextlib.suppress(LineClosed):
        agent.send(kind, **fields)


if __name__ == "__main__":
    main(int(sys.argv[1]))
