"""Stack dumps of a run's workers, taken when one hangs and by `headway stacks`.

`collect` queries all workers at once (train/stack_responder.py is their side) and merges four sources:

    /proc           state, wait channel, CPU time, threads: needs no help from the worker
    responder       a byte into the worker's pipe: a thread dumps all Python stacks and PyTorch's flight recorder
    faulthandler    a worker that leaves the byte unanswered gets SIGUSR2: the main thread's Python stack
    py-spy          where installed and allowed: Python and native stacks, also of a stopped process

A worker that dies or is too slow raises nothing: `WorkerStack.missing` says what is absent and why. The full text
goes to stacks/NNNN-N.txt.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from headway.agent.supervise.py_spy import PySpyDump, dump_native, dump_python, spied_frames
from headway.agent.supervise.stack_queries import StackQuery, has_exited, main_frames, read_proc, run_queries
from headway.agent.supervise.worker_stacks import (
    StackDump,
    WorkerStack,
    describe_collective,
    describe_location,
    describe_state,
    last_collectives,
)


def collect(
    workers: Mapping[int, int], folder: Path, attempt: int, wait_s: float = 1.0, *, native: bool = True
) -> StackDump:
    """Dump the stacks of an attempt's workers (pid by rank) within `wait_s`, plus twice PY_SPY_TIMEOUT_S with py-spy.

    A native dump pauses each process for up to a second: fine for one that hangs, not for one that works.
    """
    # 1 read /proc, before a query changes anything
    queries = [
        StackQuery(read_proc(rank, pid), folder / f"{attempt:04d}-rank-{rank}") for rank, pid in sorted(workers.items())
    ]
    with ThreadPoolExecutor(max(1, len(queries))) as pool:
        python_dumps = [pool.submit(dump_python, query.stack) for query in queries]
        # 2 query all workers at once
        run_queries(queries, wait_s)
        spied = [dump.result() for dump in python_dumps]
        # 3 native stacks last: a paused process cannot answer
        if native:
            spied = list(pool.map(dump_native, (query.stack for query in queries), spied))
    # 4 merge
    stacks = [_merge(query, dump, wait_s) for query, dump in zip(queries, spied, strict=True)]
    return StackDump(_write(folder, attempt, [_render(*pair) for pair in zip(stacks, queries, strict=True)]), stacks)


def _merge(query: StackQuery, dump: PySpyDump, wait_s: float) -> WorkerStack:
    """Everything known of a worker, and a sentence for what is not."""
    now = read_proc(query.stack.rank, query.stack.pid)
    stack = replace(query.stack, state=now.state) if has_exited(now) else query.stack
    frames = main_frames(query.stacks()) or spied_frames(dump)
    silent = _why_silent(query, stack, wait_s)
    missing = [] if frames else [f"no Python stack: {'its main thread has no frame' if query.stacks() else silent}"]
    collectives, why = last_collectives(query.collectives())
    if collectives is None:
        blocked = "native code holds the worker's GIL" if query.signalled else silent
        missing.append(f"no collectives: {why or blocked}")
    if dump.missing:
        missing.append(dump.missing)
    native = dump.native or dump.python
    return replace(stack, frames=frames, native=native, collectives=collectives, missing=tuple(missing))


def _why_silent(query: StackQuery, stack: WorkerStack, wait_s: float) -> str:
    """Why a worker did not answer."""
    if has_exited(stack):
        return "the process has exited"
    if query.descriptor is None:
        return "the process has not started its responder yet"
    if stack.state == "T":
        return "the process is stopped and handles no signal"
    if stack.state == "D":
        return f"the process is in uninterruptible sleep ({stack.waits or 'state D'}) and handles no signal"
    try:
        os.kill(stack.pid, 0)
    except PermissionError:
        return "the process belongs to another user"
    except ProcessLookupError:
        return "the process has exited"
    return f"the process did not answer within {wait_s:g} s"


def _render(stack: WorkerStack, query: StackQuery) -> str:
    """A worker's section of the text file."""
    waits = f" in {stack.waits}" if stack.waits else ""
    collective = describe_collective(stack)
    parts = [
        f"== rank {stack.rank}, process {stack.pid}: {describe_state(stack)}{waits}, {stack.cpu_s:.1f} s of CPU,"
        f" {stack.threads} thread{'s' * (stack.threads != 1)}",
        describe_location(stack),
        *stack.missing,
        f"collective: {collective}" if collective else "",
    ]
    text = "\n".join(part for part in parts if part)
    for title, content in (("Python", query.stacks()), ("py-spy", stack.native)):
        text += f"\n\n-- {title}\n{content.strip()}" if content.strip() else ""
    return text + "\n"


def _write(folder: Path, attempt: int, sections: Sequence[str]) -> Path | None:
    """Write the sections to the next free number; None if the folder cannot be written."""
    text = f"attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n" + "\n\n".join(sections)
    for number in itertools.count(1):
        path = folder / f"{attempt:04d}-{number}.txt"
        try:
            folder.mkdir(exist_ok=True)
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            return None
        return path
    return None
