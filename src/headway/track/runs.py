"""Run folders: where they lie, how they are named and found, who holds one, and how it stands.

runs/<run>/
  recipe.json  plan.json  environment.json
  events/       one file a process and attempt
  checkpoints/  step-<n>/
  logs/         <attempt>-rank-<n>.log, <attempt>-agent.log
  lock          held by the agent while the run is alive
"""

import difflib
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic_core import from_json, to_json

from headway.errors import RunError, UsageError
from headway.track.events import Event, Header, Record, clock_offset, read_ends, record_path

__all__ = [
    "RunFolder",
    "RunState",
    "RunSummary",
    "create_run",
    "find_run",
    "list_runs",
    "lock_holder",
    "lock_run",
    "next_attempt",
    "parse_ref",
    "run_id",
    "runs_root",
    "summarize",
]

RunState: TypeAlias = Literal["submitted", "running", "finished", "stopped", "failed", "interrupted"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and the names of what lies in it."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.json"

    @property
    def plan_file(self) -> Path:
        """What was planned for it."""
        return self.path / "plan.json"

    @property
    def environment_file(self) -> Path:
        """What exactness depends on: versions, chip, threads."""
        return self.path / "environment.json"

    @property
    def data_file(self) -> Path:
        """The manifest of the data it trains on."""
        return self.path / "data.json"

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of that data."""
        return self.path / "tokenizer.json"

    @property
    def companions(self) -> Path:
        """What the Hugging Face folder that its weights came from holds beside them; not there for other runs."""
        return self.path / "huggingface"

    @property
    def events(self) -> Path:
        """Folder of the run's records."""
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.path / "checkpoints"

    @property
    def initial(self) -> Path:
        """The first weights of a class of the user's own, as a checkpoint of step 0, and what is known of it."""
        return self.path / "initial"

    @property
    def logs(self) -> Path:
        """Folder of what its processes printed."""
        return self.path / "logs"

    @property
    def id_file(self) -> Path:
        """What tells it from other runs of its name."""
        return self.path / "id"

    @property
    def key_file(self) -> Path:
        """What the agents of its nodes know each other by."""
        return self.path / "key"

    @property
    def leases(self) -> Path:
        """Which agent leads those of other nodes, and which did before."""
        return self.path / "leases"

    @property
    def suspects_file(self) -> Path:
        """Machines that it does without."""
        return self.path / "suspects"

    @property
    def lock_file(self) -> Path:
        """Held by the process that runs it."""
        return self.path / "lock"

    @property
    def faults(self) -> Path:
        """Which faults on purpose have struck it, and when."""
        return self.path / "faults"

    @property
    def stacks(self) -> Path:
        """What its workers were doing when one hung, or when somebody asked."""
        return self.path / "stacks"

    @property
    def rendezvous(self) -> Path:
        """Folder where the workers of an attempt meet."""
        return self.path / "rendezvous"


def run_id(run: RunFolder) -> str:
    """What tells a run from others of its name, wherever its folder is copied to; made when first asked for."""
    try:
        with run.id_file.open("x") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return run.id_file.read_text().strip()


def runs_root(option: Path | None = None) -> Path:
    """Return the folder of all runs: the option given, else $HEADWAY_RUNS, else ./runs."""
    return option or Path(os.environ.get("HEADWAY_RUNS") or "runs")


def create_run(root: Path, recipe_name: str, name: str | None = None) -> RunFolder:
    """Make a new run's folder, called after its recipe or as told."""
    if name is not None and (not _NAME.fullmatch(name) or name == "last"):
        raise RunError(
            f"{name!r} cannot name a run",
            hint="at most 64 letters, digits, dots, dashes and underscores, a letter or digit first; not `last`",
        )
    while True:
        run = RunFolder(root / (name or f"{recipe_name}-{secrets.token_hex(2)}"))
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            if name is None:
                continue
            raise RunError(
                f"there is a run {name} already", hint=f"choose another name, or `headway resume {name}`"
            ) from None
        except OSError as error:
            raise RunError(
                f"cannot make the run's folder {run.path}: {error.strerror}",
                hint="name another folder with --runs or HEADWAY_RUNS",
            ) from error
        for folder in (run.events, run.checkpoints, run.logs):
            folder.mkdir()
        return run


def list_runs(root: Path) -> list[RunFolder]:
    """Return all runs, the most recently active first."""
    folders = [RunFolder(path) for path in root.iterdir() if (path / "events").is_dir()] if root.is_dir() else []
    return sorted(folders, key=lambda run: (_active(run), run.name), reverse=True)


def find_run(root: Path, ref: str) -> RunFolder:
    """Return the run of this name, of this unique prefix, or the `last` active one."""
    runs = list_runs(root)
    if not runs:
        raise RunError(f"there are no runs in {root}", hint="name their folder with --runs or HEADWAY_RUNS")
    if ref == "last":
        return runs[0]
    names = [run.name for run in runs]
    matches = [run for run in runs if run.name == ref] or [run for run in runs if ref and run.name.startswith(ref)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(sorted(run.name for run in matches)[:8])
        raise RunError(f"{len(matches)} runs begin with {ref!r}: {shown}", hint="give more of the name")
    near = difflib.get_close_matches(ref, names, n=3, cutoff=0.5) or names[:3]
    raise RunError(
        f"there is no run {ref!r} in {root}", hint=f"the nearest: {', '.join(near)} (headway runs lists all)"
    )


def parse_ref(text: str) -> tuple[str, int | None]:
    """Split RUN@STEP into the run and the step; RUN alone has no step."""
    ref, at, step = text.partition("@")
    if not at:
        return ref, None
    if not (ref and step.isascii() and step.isdigit()):
        raise UsageError(f"{text!r} is no RUN@STEP", hint="for example last@200")
    return ref, int(step)


def next_attempt(run: RunFolder) -> int:
    """Return the number of the attempt that would start now: one more than the latest recorded."""
    return max(_attempts(run), default=0) + 1


def _attempts(run: RunFolder) -> list[int]:
    numbers = {path.name.partition("-")[0] for path in run.events.glob("*-*.jsonl")}
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def _active(run: RunFolder) -> int:
    """Return when a run last wrote an event, else when it was made (ns)."""
    times = [path.stat().st_mtime_ns for path in run.events.glob("*.jsonl")]
    return max(times, default=run.path.stat().st_mtime_ns)


# -- the lock


@contextmanager
def lock_run(run: RunFolder, seize: bool = False) -> Iterator[None]:
    """Hold a run for this process, or refuse when another one has it; the kernel lets go when it dies.

    Whoever has the right to may `seize` it from one that cannot be reached.
    """
    try:
        file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(
            f"cannot lock run {run.name}: {error.strerror}",
            hint="check that its folder exists and is yours to write",
        ) from error
    try:
        if not seize:
            _lock(run, file)
        elif not _lock_soon(file):
            os.close(file)
            run.lock_file.unlink(missing_ok=True)
            file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _lock(run, file)
        os.ftruncate(file, 0)
        os.pwrite(file, to_json({"pid": os.getpid(), "host": socket.gethostname()}), 0)
        try:
            yield
        finally:
            os.ftruncate(file, 0)
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


def lock_holder(run: RunFolder) -> int | None:
    """Return the process that holds a run, None when nobody does; 0 when it has not said its name."""
    try:
        file = os.open(run.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A shared lock of a moment: others who only look are not in the way, and `hold` tries more than once.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _named_in(file)[0]
    finally:
        os.close(file)


def _lock_soon(file: int) -> bool:
    for pause_s in (0.01, 0.02, 0.05, 0.1, 0.0):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(pause_s)
    return False


def _lock(run: RunFolder, file: int) -> None:
    """Take the lock; a few tries, for `holder` in some other process may be looking at it."""
    if _lock_soon(file):
        return
    pid, host = _named_in(file)
    elsewhere = f" on {host}" if host not in ("", socket.gethostname()) else ""
    raise RunError(
        f"run {run.name} is in use by process {pid}{elsewhere}",
        hint=f"wait for it, or stop it with `headway stop {run.name}`",
    )


def _named_in(file: int) -> tuple[int, str]:
    """Return the process and host that a lock names."""
    try:
        named = from_json(os.pread(file, 4096, 0))
        return int(named["pid"]), str(named["host"])
    except (ValueError, KeyError, TypeError):
        return 0, ""


# -- how a run stands


@dataclass(frozen=True)
class RunSummary:
    """How a run stands, in one row."""

    name: str
    state: RunState
    step: int
    total_steps: int | None
    loss: float | None
    attempts: int
    started: float | None
    """Unix seconds."""
    seconds: float
    """Time that its attempts took, together."""
    workers: int | None
    device: str
    reason: str
    """Why the last attempt ended, in the agent's words."""


def summarize(run: RunFolder) -> RunSummary:
    """Say how a run stands, from the ends of its records: as fast for a million steps as for ten."""
    attempts = _attempts(run)
    agents = [_ends(run, number, "agent") for number in attempts]
    leaders = [_ends(run, number, "rank-0") for number in attempts]
    told = [event for record in agents for event in record.events]
    start = _last(told, "attempt")
    end = _last(agents[-1].events, "end") if agents else {}
    step, loss = _progress(leaders)
    facts = _last([event for record in leaders for event in record.events], "facts")
    return RunSummary(
        name=run.name,
        state=_state(run, end),
        step=step,
        total_steps=_count(facts.get("total_steps")),
        loss=loss,
        attempts=len(attempts),
        started=next((record.header.wall for record in agents if record.header.wall), None),
        seconds=sum(_length_s(*pair) for pair in zip(agents, leaders, strict=True)),
        workers=_count(start.get("workers")),
        device=str(start.get("device", "")),
        reason=str(end.get("reason", "")),
    )


def _state(run: RunFolder, end: Event) -> RunState:
    if lock_holder(run) is not None:
        return "running"
    outcomes: dict[object, RunState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
    return outcomes.get(end.get("outcome"), "interrupted")


def _progress(leaders: list[Record]) -> tuple[int, float | None]:
    """Return the last step that counts and the last loss, as rank 0 of each attempt tells."""
    step, loss = 0, None
    for record in leaders:
        for event in record.events:
            if event["kind"] in ("resumed", "step"):
                step = _count(event.get("step")) or 0
                loss = event.get("loss", loss)
    return step, loss if isinstance(loss, float | int) else None


def _length_s(agent: Record, leader: Record) -> float:
    """Return how long an attempt lasted: to its end, or to the last thing heard of it."""
    last = max((_time(event) for event in agent.events), default=0)
    if not _last(agent.events, "end") and leader.events and agent.header.wall:
        offset = clock_offset(leader.header, agent.header)
        last = max(last, *(_time(event) + offset for event in leader.events))
    return max(last, 0) / 1e9


def _ends(run: RunFolder, attempt: int, process: str) -> Record:
    try:
        return read_ends(record_path(run.events, attempt, process))
    except FileNotFoundError:
        return Record(Header(attempt, process), [])


def _last(events: list[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["kind"] == kind), {})


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _time(event: Event) -> int:
    return _count(event.get("t")) or 0
