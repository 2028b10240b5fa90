"""`headway stacks RUN`: what the workers of a running run are doing at this moment."""

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import Json, Run, Runs

if TYPE_CHECKING:
    from headway.agent.supervise.stack_dumps import Frame, StackDump, WorkerStack
    from headway.track import RunFolder

__all__ = ["stacks"]

WIDTH = 80
WAIT_S = 2.0
"""Longer than the agent waits: a run that works answers when its step lets it."""


def stacks(
    run: Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this worker.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="C and C++ frames too: needs py-spy, holds each worker for a second.")
    ] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show what each worker of a running run is doing: its Python stack, its state, its last collective.

    The run goes on. All threads, and what py-spy sees where it is installed, are in the file named at the end.
    """
    from dataclasses import asdict

    from headway.agent.supervise.stack_dumps import collect, describe_collective, describe_location
    from headway.cli.text import print_json
    from headway.track import find_run, runs_root

    folder = find_run(runs_root(runs), run)
    attempt, workers = _workers(folder)
    taken = collect(_chosen(folder, workers, rank), folder.stacks, attempt, WAIT_S, native=native)
    if json:
        ranks = [
            asdict(seen) | {"line": describe_location(seen), "collective": describe_collective(seen)}
            for seen in taken.workers
        ]
        print_json({"run": folder.name, "attempt": attempt, "path": taken.path, "ranks": ranks})
    else:
        print("\n".join(_screen(folder, attempt, taken)))


def _workers(run: "RunFolder") -> tuple[int, dict[int, int]]:
    """The last attempt of a run that is alive on this machine, and the processes of its workers by rank."""
    import socket

    from headway.errors import RunError
    from headway.track import Header, Record, lock_holder, next_attempt, read_record, record_path

    if lock_holder(run) is None:
        kept = len(list(run.stacks.glob("*-*.txt"))) if run.stacks.is_dir() else 0
        hint = f"what was taken while it ran is in {run.stacks}" if kept else "headway runs shows what is running"
        raise RunError(f"run {run.name} is not running, so its workers do nothing", hint=hint)
    attempt = max(1, next_attempt(run) - 1)
    path = record_path(run.events, attempt, "agent")
    record = read_record(path) if path.exists() else Record(Header(attempt, "agent"), [])
    if record.header.host not in ("", socket.gethostname()):
        raise RunError(f"run {run.name} is on {record.header.host}", hint="ask there: stacks are taken on one machine")
    workers: dict[int, int] = {}
    for event in record.events:
        if event["kind"] == "worker":
            workers[event["rank"]] = event["pid"]
        elif event["kind"] == "exit":
            workers.pop(event["rank"], None)
    return attempt, workers


def _chosen(run: "RunFolder", workers: dict[int, int], rank: int | None) -> dict[int, int]:
    """The workers asked for."""
    from headway.errors import RunError, UsageError

    if not workers:
        raise RunError(
            f"run {run.name} has no workers at this moment", hint=f"it starts or ends; headway logs {run.name} tells"
        )
    if rank is not None and rank not in workers:
        there = ", ".join(str(number) for number in sorted(workers))
        raise UsageError(f"run {run.name} has no worker {rank} at this moment", hint=f"there are: {there}")
    return workers if rank is None else {rank: workers[rank]}


def _screen(run: "RunFolder", attempt: int, taken: "StackDump") -> list[str]:
    """All of it for people; what every worker lacks is said once."""
    shared = [line for line in taken.workers[0].missing if all(line in seen.missing for seen in taken.workers)]
    lines = []
    for seen in taken.workers:
        lines += [*_worker(seen, shared if len(taken.workers) > 1 else []), ""]
    if len(taken.workers) > 1:
        lines += [part for line in shared for part in _wrap(f"all ranks: {line}", "  ")]
    where = "could not be written: no room, or not yours to write" if taken.path is None else str(taken.path)
    lines += [f"attempt {attempt}, all threads: {where}"]
    return [*lines, f"next: headway logs {run.name}"]


def _worker(seen: "WorkerStack", known: list[str]) -> list[str]:
    """One worker: a heading, the frames of its main thread, its last collective, what is missing."""
    from headway.agent.supervise.stack_dumps import describe_collective, describe_location, describe_state

    waits = f" in {seen.waits}" if seen.waits else ""
    heading = f"rank {seen.rank}  process {seen.pid}  {describe_state(seen)}{waits}  {seen.cpu_s:.1f} s CPU"
    line, collective = describe_location(seen), describe_collective(seen)
    if len(heading) + 2 + len(line) <= WIDTH:
        heading, line = f"{heading}  {line}".rstrip(), ""
    lines = [heading, *_wrap(line, "  "), *_table(seen.frames)]
    lines += _wrap(f"collective: {collective}", "  ") if collective else []
    return lines + [part for missing in seen.missing if missing not in known for part in _wrap(missing, "  ")]


def _table(frames: "tuple[Frame, ...]") -> list[str]:
    """A line a frame, the innermost first: function, and place as far as there is room for it."""
    from headway.agent.supervise.stack_dumps import short_path

    width = min(28, max((len(frame.function) for frame in frames), default=0))
    room = WIDTH - width - 6
    rows = []
    for frame in frames:
        place = f"{short_path(frame.file)}:{frame.line}"
        place = place if len(place) <= room else f"...{place[3 - room :]}"
        function = frame.function if len(frame.function) <= width else f"{frame.function[: width - 3]}..."
        rows.append(f"    {function:{width}}  {place}")
    return rows


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
