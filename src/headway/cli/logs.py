"""`headway logs RUN`: what the processes of a run printed."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json, Run, Runs

if TYPE_CHECKING:
    from headway.cli.run_lookup import RunSync
    from headway.cluster.submit.sweeps import Sweep
    from headway.errors import RunError
    from headway.track import RunFolder

__all__ = ["is_alive", "logs"]

_POLL_S = 0.25
_POLL_ENGINE_S = 2.0
"""Between questions to an engine, which others ask too."""
MANY = 8
"""Names of runs that are told at a time."""


def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this worker's.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Of this attempt (default: the last).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until the run ends.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print what a run's processes printed, its engine's job included. With --json one object a line: file, line.

    What an agent said on somebody's terminal is in no log: then its record tells.
    """
    from headway.cli.jobs import sweep_named
    from headway.cli.run_lookup import RunSync
    from headway.errors import RunError
    from headway.track import find_run, runs_root

    root = runs_root(runs)
    sweep = sweep_named(root, run)
    if sweep is not None:
        raise _is_sweep(sweep)
    folder = find_run(root, run)
    brought = RunSync(folder)
    brought.now()
    files = _files(folder, rank, attempt)
    if not files and not follow:
        there = ", ".join(sorted(path.name for path in folder.logs.glob("*-*.log"))) or "none"
        raise RunError(f"run {folder.name} has no such log", hint=f"there are: {there}")
    show = _printer(json, headings=rank is None)
    for name, line in _lines(folder, rank, attempt, follow, brought):
        show(name, line)


def _is_sweep(sweep: "Sweep") -> "RunError":
    """What to ask for instead."""
    from headway.errors import RunError

    names = [point.run for point in sweep.points]
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return RunError(
        f"{sweep.name} is a sweep, and its runs have logs of their own",
        hint=f"its runs: {', '.join(names[:MANY])}{more}",
    )


def _files(run: "RunFolder", rank: int | None, attempt: int | None) -> list[Path]:
    """The logs asked for: of the attempt named, else of the last that has any."""
    from headway.agent.remote.store_mirror import start_failures

    process = "*" if rank is None else f"rank-{rank}"
    paths = [path for path in run.logs.glob(f"*-{process}.log") if path.name.partition("-")[0].isdecimal()]
    wanted = attempt or max((_attempt(path) for path in paths), default=0)
    own = sorted(path for path in paths if _attempt(path) == wanted)
    if rank is not None:
        return own
    job = [*_of_job(run), *start_failures(run)] if attempt is None else []
    told = job or any(path.name.endswith("-keeper.log") for path in own)
    return [*job, *([] if told else _of_agent(run, attempt)), *own]


def _of_agent(run: "RunFolder", attempt: int | None) -> list[Path]:
    """The records of agents that led, of one attempt or of all: what they said on somebody's terminal is in no log."""
    return sorted(run.events.glob("*-agent.jsonl" if attempt is None else f"{attempt:04d}-agent.jsonl"))


def _of_job(run: "RunFolder") -> list[Path]:
    """What the newest start of a submitted run's job printed, machine by machine."""
    if not (run.path / "jobs.jsonl").exists():
        return []
    from headway.cluster.engines.settings import open_engine
    from headway.cluster.engines.submissions import last_submission
    from headway.errors import EngineError

    job = last_submission(run.path)
    try:
        found = [] if job is None else open_engine(job.engine, run.path.parent).logs(job.job)
    except EngineError:  # there are the run's own logs, whatever has become of the engine
        return []
    last = max((path.name.partition("-")[0] for path in found), default="")
    return [path for path in found if path.exists() and path.name.startswith(f"{last}-")]


def is_alive(run: "RunFolder") -> bool:
    """Whether more may come: somebody holds the run, or an engine will have it started."""
    from headway.track import lock_holder

    if lock_holder(run) is not None:
        return True
    if not (run.path / "jobs.jsonl").exists():
        return False
    from headway.cluster.engines import OVER
    from headway.cluster.submit.runs import submitted_runs

    return any(
        one.status.state not in OVER and one.status.state != "unknown" for one in submitted_runs(run.path.parent, [run])
    )


def _attempt(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _lines(
    run: "RunFolder", rank: int | None, attempt: int | None, follow: bool, brought: "RunSync"
) -> Iterator[tuple[str, str]]:
    """Each file's name and lines; when following, new ones as they come until nobody holds the run, or will."""
    from headway.track import lock_holder

    offsets: dict[Path, int] = {}
    told = defaultdict[Path, _Words](_Words)
    while True:
        alive = follow and is_alive(run)  # asked before reading, so that the last words are not missed
        if follow:
            brought.now(at_once=not alive)
        for path in _files(run, rank, attempt):
            data = _read_from(path, offsets.get(path, 0))
            whole = data.rfind(b"\n") + 1 if alive else len(data)
            offsets[path] = offsets.get(path, 0) + whole
            for line in data[:whole].splitlines():
                words = told[path].of(line) if path.suffix == ".jsonl" else [line.decode(errors="replace")]
                yield from ((path.name, one) for one in words)
        if not alive:
            return
        time.sleep(_POLL_S if lock_holder(run) is not None else _POLL_ENGINE_S)


class _Words:
    """What the events of an agent's record say to people, as its view would."""

    def __init__(self) -> None:
        from headway.cli.view import LiveStatus

        self._standing, self._wall, self._told = LiveStatus(), 0.0, 0

    def of(self, line: bytes) -> list[str]:
        """Of one event: nothing, or a line or two with the time before."""
        from pydantic_core import from_json

        try:
            event = from_json(line)
            clock = time.strftime("%H:%M:%S", time.localtime(self._wall + event.get("t", 0) / 1e9))
            return [f"{clock} {text}" for text in self._texts(event)]
        except (ValueError, TypeError, KeyError, AttributeError):
            return []  # a torn line

    def _texts(self, event: dict[str, Any]) -> list[str]:
        self._standing.take(event)
        notices, self._told = self._standing.notices[self._told :], len(self._standing.notices)
        match event["kind"]:
            case "open":
                self._wall = event.get("wall", 0.0)
            case "attempt":
                nodes = f", {event['nodes']} nodes" if "nodes" in event else ""
                again = f", from step {event['from_step']}" if event["from_step"] else ""
                return [f"{event['workers']} worker{'s' * (event['workers'] != 1)} on {event['device']}{nodes}{again}"]
            case "end":
                return [f"{event['outcome']}: {event['reason']}", *notices]
            case "log" if event.get("message"):
                return [event["message"]]
        return notices


def _read_from(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def _printer(json: bool, headings: bool) -> Callable[[str, str], None]:
    """Print lines as JSON objects, or plain with a heading wherever the file changes."""
    from pydantic_core import to_json

    last = ""

    def show(name: str, line: str) -> None:
        nonlocal last
        if json:
            print(to_json({"file": name, "line": line}).decode(), flush=True)
            return
        if headings and name != last:
            print(f"== {name}", flush=True)
            last = name
        print(line, flush=True)

    return show
