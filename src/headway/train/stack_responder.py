"""A worker that can be asked what it is doing, whatever its main thread hangs in.

There are two ways to ask, and neither needs the main thread to come back:

    a byte into a pipe   a daemon thread, which costs nothing until then, writes the Python stack of every thread to
                         NNNN-rank-N-threads.txt and PyTorch's flight recorder, which knows the last collectives, to
                         NNNN-rank-N-collectives.json. It holds the interpreter meanwhile, so that no stack moves.
    SIGUSR2              faulthandler appends the main thread's Python stack to NNNN-rank-N.txt. Its handler takes no
                         lock: it answers for a thread that never lets go of the interpreter, too.

The agent (agent/supervise/stack_dumps.py) sends the signal only to a worker that leaves the byte unanswered. For the handler looks at
stacks that may be moving: with all threads, a busy process died of SIGSEGV at the first to third signal; with the main
thread alone, at one signal in some hundreds to thousands if that thread runs Python just then (Python 3.11 to 3.13). A
thread that holds the interpreter runs C code, and its frames lie still. 15,000 answers to a byte did no harm.

The pipe has no name: the first line of NNNN-rank-N.txt tells its descriptor, and whoever may look into this process
opens it as /proc/PID/fd/N. So nothing is left behind. Below that line stands the main thread as it was when it began
to listen: its outermost frame tells where a later dump ends.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

__all__ = ["answer_requests"]

RECORDERS = {"fr": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""PyTorch's flight recorders: gloo writes into the first; NCCL has one of its own, which only CUDA builds have."""


def answer_requests(folder: Path, attempt: int, rank: int) -> None:
    """From now on, answer in `folder` when asked. Called once, by the main thread.

    A worker that cannot write there says so in its log and trains on.
    """
    assert threading.current_thread() is threading.main_thread(), "the thread that is shown is the one that works"
    name = f"{attempt:04d}-rank-{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.txt").open("ab", buffering=0)
        asked, ask = os.pipe()
        file.write(b"process %d answers; descriptor %d asks\n" % (os.getpid(), ask))
    except OSError as error:
        print(f"this worker cannot show its stacks: {folder}: {error.strerror}", file=sys.stderr)
        return
    threading.Thread(target=_answer, args=(asked, folder, name), name="stacks", daemon=True).start()
    faulthandler.dump_traceback(file, all_threads=False)
    faulthandler.register(signal.SIGUSR2, file, all_threads=False)


def _answer(asked: int, folder: Path, name: str) -> None:
    """Write what is known, as often as asked: beside and then renamed, so that whoever sees it sees all of it."""
    beside = folder / f"{name}.part"
    while os.read(asked, 4096):
        with contextlib.suppress(OSError):  # a full disk: the agent says that nothing came
            _write_threads(beside)
            beside.replace(folder / f"{name}-threads.txt")
            beside.write_bytes(_collectives())
            beside.replace(folder / f"{name}-collectives.json")


def _write_threads(path: Path) -> None:
    """Every thread's stack; faulthandler reads no source files, which might lie on a disk that hangs."""
    names = ", ".join(f"0x{thread.ident or 0:016x} {thread.name}" for thread in threading.enumerate())
    with path.open("wb", buffering=0) as file:
        file.write(f"main thread 0x{threading.main_thread().ident:016x} of {names}\n".encode(errors="replace"))
        faulthandler.dump_traceback(file, all_threads=True)


def _collectives() -> bytes:
    """All flight recorders' JSON in one object; an `error` in the place of what cannot be had."""
    # Not an import: it would take a second where torch is not used, and wait for one that hangs.
    torch_side = sys.modules.get("torch._C._distributed_c10d")
    if torch_side is None:
        return b'{"error":"torch.distributed is not imported"}'
    parts = []
    for name, function in RECORDERS.items():
        dump = getattr(torch_side, function, None)
        if dump is None:
            continue
        try:
            told = dump()
        except Exception as error:  # whatever it is, the other recorder may still answer
            told = json.dumps({"error": f"{type(error).__name__}: {error}"})
        parts.append(b'"%s":%s' % (name.encode(), told.encode() if isinstance(told, str) else told))
    return b"{%s}" % b",".join(parts) if parts else b'{"error":"this torch has no flight recorder"}'
