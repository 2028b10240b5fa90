"""`headway stacks RUN`: shows what each worker of a running run is doing."""

import socket
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from headway.agent.supervise.stack_dumps import collect
from headway.agent.supervise.worker_stacks import (
    Frame,
    StackDump,
    WorkerStack,
    describe_collective,
    describe_location,
    describe_state,
    short_path,
)
from headway.cli.options import Json, Run, Runs
from headway.cli.text import columns, print_json
from headway.errors import RunError, UsageError
from headway.track import (
    Header,
    Record,
    RunFolder,
    find_run,
    lock_holder,
    next_attempt,
    read_record,
    record_path,
    runs_root,
)

WAIT_S = 2.0
"""Longer than the agent waits: a busy worker answers once its step allows."""


def stacks(
    run: Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this worker.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Include C and C++ frames; needs py-spy, pauses each worker for a second.")
    ] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show what each worker is doing right now: its Python stack, state and last collective.

    The run continues. All threads, with py-spy's view if it is installed, are in the file named at the end.
    """
    folder = find_run(runs_root(runs), run)
    attempt, workers = _workers(folder)
    dump = collect(_chosen(folder, workers, rank), folder.stacks, attempt, WAIT_S, native=native)
    if json:
        ranks = [
            asdict(seen) | {"line": describe_location(seen), "collective": describe_collective(seen)}
            for seen in dump.workers
        ]
        print_json({"run": folder.name, "attempt": attempt, "path": dump.path, "ranks": ranks})
    else:
        print("\n".join(_screen(folder, attempt, dump)))


def _workers(run: RunFolder) -> tuple[int, dict[int, int]]:
    """Return the last attempt of a run that is active on this machine, and its workers' process ids by rank."""
    if lock_holder(run) is None:
        saved = any(run.stacks.glob("*-*.txt"))
        hint = f"stacks taken while it ran are in {run.stacks}" if saved else "headway ps lists active runs"
        raise RunError(f"run {run.name} is not running", hint=hint)
    attempt = max(1, next_attempt(run) - 1)
    path = record_path(run.events, attempt, "agent")
    record = read_record(path) if path.exists() else Record(Header(attempt, "agent"), [])
    if record.header.host not in ("", socket.gethostname()):
        raise RunError(f"run {run.name} is on {record.header.host}", hint="run headway stacks there")
    workers: dict[int, int] = {}
    for event in record.events:
        if event["kind"] == "worker":
            workers[event["rank"]] = event["pid"]
        elif event["kind"] == "exit":
            workers.pop(event["rank"], None)
    return attempt, workers


def _chosen(run: RunFolder, workers: dict[int, int], rank: int | None) -> dict[int, int]:
    """Return the selected workers."""
    if not workers:
        raise RunError(
            f"run {run.name} has no workers right now", hint=f"it is starting or ending: {run.command('logs')}"
        )
    if rank is not None and rank not in workers:
        ranks = ", ".join(str(number) for number in sorted(workers))
        raise UsageError(f"run {run.name} has no worker {rank} right now", hint=f"its workers: {ranks}")
    return workers if rank is None else {rank: workers[rank]}


def _screen(run: RunFolder, attempt: int, dump: StackDump) -> list[str]:
    """Return the text of all workers; what is missing for all of them comes once."""
    shared = [line for line in dump.workers[0].missing if all(line in seen.missing for seen in dump.workers)]
    lines = []
    for seen in dump.workers:
        lines += [*_worker(seen, shared if len(dump.workers) > 1 else []), ""]
    if len(dump.workers) > 1:
        lines += [part for line in shared for part in _wrap(f"all ranks: {line}", "  ")]
    file = "not written: no space or no permission" if dump.path is None else str(dump.path)
    lines += [f"attempt {attempt}, all threads: {file}"]
    return [*lines, f"next: {run.command('logs')}"]


def _worker(seen: WorkerStack, known: list[str]) -> list[str]:
    """Return the lines of a worker: heading, frames of its main thread, last collective, what is missing."""
    waits = f" in {seen.waits}" if seen.waits else ""
    heading = f"rank {seen.rank}  process {seen.pid}  {describe_state(seen)}{waits}  {seen.cpu_s:.1f} s CPU"
    line, collective = describe_location(seen), describe_collective(seen)
    if len(heading) + 2 + len(line) <= columns():
        heading, line = f"{heading}  {line}".rstrip(), ""
    lines = [heading, *_wrap(line, "  "), *_table(seen.frames)]
    lines += _wrap(f"collective: {collective}", "  ") if collective else []
    return lines + [part for missing in seen.missing if missing not in known for part in _wrap(missing, "  ")]


def _table(frames: tuple[Frame, ...]) -> list[str]:
    """Return one line per frame, innermost first: function, and as much of file and line as fits."""
    width = min(28, max((len(frame.function) for frame in frames), default=0))
    room = columns() - width - 6
    rows = []
    for frame in frames:
        location = f"{short_path(frame.file)}:{frame.line}"
        location = location if len(location) <= room else f"...{location[3 - room :]}"
        function = frame.function if len(frame.function) <= width else f"{frame.function[: width - 3]}..."
        rows.append(f"    {function:{width}}  {location}")
    return rows


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, columns(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
