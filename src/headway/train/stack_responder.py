"""Stack dumps on request, whatever the worker's main thread hangs in.

There are two kinds of requests, and neither needs the main thread to return:

    a byte into a pipe   a daemon thread, which costs nothing until then, writes the Python stack of every thread to
                         NNNN-rank-N-threads.txt and PyTorch's flight recorder, which knows the last collectives, to
                         NNNN-rank-N-collectives.json. It holds the GIL meanwhile, so that no stack changes.
    SIGUSR2              faulthandler appends the main thread's Python stack to NNNN-rank-N.txt. Its handler takes no
                         lock, so that it also answers for a thread that never releases the GIL.

The agent (agent/supervise/stack_dumps.py) sends the signal only to a worker that leaves the byte unanswered. For the
handler looks at stacks that may be moving: with all threads, a busy process died of SIGSEGV at the first to third
signal; with the main thread alone, at one signal in some hundreds to thousands if that thread runs Python just then
(Python 3.11 to 3.13). A thread that holds the interpreter runs C code, and its frames lie still. 15,000 answers to a
byte did no harm.

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

RECORDERS = {"fr": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""PyTorch's flight recorders: gloo writes into the first; NCCL has one of its own, which only CUDA builds have."""


def answer_requests(folder: Path, attempt: int, rank: int) -> None:
    """Answer requests in `folder` from now on. Call it once, from the main thread.

    A worker that cannot write there logs that and continues training.
    """
    assert threading.current_thread() is threading.main_thread(), "the dump shows the main thread"
    name = f"{attempt:04d}-rank-{rank}"
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / f"{name}.txt").open("ab", buffering=0)
        asked, ask = os.pipe()
        file.write(b"process %d answers; descriptor %d asks\n" % (os.getpid(), ask))
    except OSError as error:
        print(f"cannot write stack dumps to {folder}: {error.strerror}", file=sys.stderr)
        return
    threading.Thread(target=_answer, args=(asked, folder, name), name="stacks", daemon=True).start()
    faulthandler.dump_traceback(file, all_threads=False)
    faulthandler.register(signal.SIGUSR2, file, all_threads=False)


def _answer(asked: int, folder: Path, name: str) -> None:
    """Write dumps whenever requested, atomically by renaming."""
    partial = folder / f"{name}.part"
    while os.read(asked, 4096):
        with contextlib.suppress(OSError):  # disk full: the agent reports the missing answer
            _write_threads(partial)
            partial.replace(folder / f"{name}-threads.txt")
            partial.write_bytes(_collectives())
            partial.replace(folder / f"{name}-collectives.json")


def _write_threads(path: Path) -> None:
    """Write every thread's stack; faulthandler reads no source files, which may be on a hung disk."""
    names = ", ".join(f"0x{thread.ident or 0:016x} {thread.name}" for thread in threading.enumerate())
    with path.open("wb", buffering=0) as file:
        file.write(f"main thread 0x{threading.main_thread().ident:016x} of {names}\n".encode(errors="replace"))
        faulthandler.dump_traceback(file, all_threads=True)


def _collectives() -> bytes:
    """Return the JSON of all flight recorders in one object, with an `error` for a failing one."""
    # Not an import: it would take a second where torch is unused, and wait for a hung import.
    torch_side = sys.modules.get("torch._C._distributed_c10d")
    if torch_side is None:
        return b'{"error":"torch.distributed is not imported"}'
    parts = []
    for name, function in RECORDERS.items():
        dump = getattr(torch_side, function, None)
        if dump is None:
            continue
        try:
            text = dump()
        except Exception as error:  # the other recorder may still answer
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        parts.append(b'"%s":%s' % (name.encode(), text.encode() if isinstance(text, str) else text))
    return b"{%s}" % b",".join(parts) if parts else b'{"error":"this torch has no flight recorder"}'
