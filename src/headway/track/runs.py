"""Run folders: layout, names, lookup, locking, and a one-row summary of a run's state.

runs/<run>/
  recipe.json  plan.json  environment.json
  events/       one file per process and attempt
  checkpoints/  step-<n>/
  logs/         <attempt>-rank-<n>.log, <attempt>-agent.log
  lock          held by the agent while the run is alive
runs/.failed/<run>/  a run that failed before its first step: its name is free for the next try
"""

import difflib
import errno
import fcntl
import itertools
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic_core import from_json, to_json

from headway.errors import RunError, UsageError
from headway.track.access import PRIVATE, new_run_mode, umask_of
from headway.track.events import Event, Header, Record, clock_offset, read_ends, record_path

RunState: TypeAlias = Literal["submitted", "running", "finished", "stopped", "failed", "interrupted"]

FAILED = ".failed"
"""Folder, beside all runs, of those that failed before their first step."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COPY = "~"  # between the name of a failed run and its number, if there are several; no run's name has one


class _PathInRun:
    """Attribute of RunFolder: a path in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", _: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the paths in it."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    recipe_file = _PathInRun("recipe.json")
    """The resolved recipe."""
    plan_file = _PathInRun("plan.json")
    """The plan it started with."""
    environment_file = _PathInRun("environment.json")
    """What bitwise reproducibility depends on: versions, chip, threads."""
    data_file = _PathInRun("data.json")
    """The manifest of its dataset."""
    tokenizer_file = _PathInRun("tokenizer.json")
    """The tokenizer of its dataset."""
    companions = _PathInRun("huggingface")
    """Other files of the Hugging Face folder its weights came from; absent for other runs."""
    events = _PathInRun("events")
    """Its event records."""
    checkpoints = _PathInRun("checkpoints")
    """Its checkpoints."""
    initial = _PathInRun("initial")
    """The initial weights of a custom model class, as a checkpoint of step 0, with facts about the class."""
    labels_file = _PathInRun("labels.json")
    """Tags, a note, and whether it is archived."""
    evals = _PathInRun("evals")
    """Evaluations of its checkpoints."""
    samples = _PathInRun("samples")
    """Images or video that a diffusion model generated during training."""
    logs = _PathInRun("logs")
    """Output of its processes."""
    logged = _PathInRun("logged")
    """Images, audio, tables and artifacts that code of the user's own logged."""
    trackers = _PathInRun("trackers")
    """How far other trackers have received its events."""
    id_file = _PathInRun("id")
    """Its unique id."""
    key_file = _PathInRun("key")
    """The key that its agents authenticate each other with."""
    leases = _PathInRun("leases")
    """Leader leases: the current leader and its predecessors."""
    suspects_file = _PathInRun("suspects")
    """Machines excluded from it."""
    lock_file = _PathInRun("lock")
    """Locked by the process that runs it."""
    faults = _PathInRun("faults")
    """Injected faults that have fired, and when."""
    stacks = _PathInRun("stacks")
    """Stack dumps of its workers, from hangs and requests."""
    rendezvous = _PathInRun("rendezvous")
    """Rendezvous files of its workers."""

    def command(self, verb: str, *words: str) -> str:
        """Return the command of a verb about this run, to be copied from the terminal."""
        if self.path.parent.name == FAILED:
            return command(self.path.parent.parent, verb, f"{FAILED}/{self.name}", *words)
        return command(self.path.parent, verb, self.name, *words)


def command(root: Path, *words: str) -> str:
    """Return a headway command to print, with --runs unless a shell here finds this folder of runs without it."""
    found_anyway = root.absolute() == runs_root().absolute()
    return " ".join(["headway", *words, *([] if found_anyway else ["--runs", shlex.quote(str(root))])])


def run_id(run: RunFolder) -> str:
    """Return a run's unique id, which stays the same in copies of its folder; created on first use."""
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
    """Create a run's folder, named after its recipe or as given."""
    if name is not None and (not RUN_NAME.fullmatch(name) or name == "last"):
        raise RunError(
            f"invalid run name {name!r}",
            hint="use up to 64 letters, digits, dots, dashes and underscores; start with a letter or digit; not `last`",
            usage=True,
        )
    mode = new_run_mode()
    create_private_folder(root)
    while True:
        run = RunFolder(root / (name or f"{recipe_name}-{secrets.token_hex(2)}"))
        try:
            run.path.mkdir(PRIVATE)
            run.path.chmod(mode)  # whatever the umask is
        except FileExistsError:
            if name is None:
                continue
            raise RunError(f"run {name} already exists", hint=_taken_hint(run), usage=True) from None
        except OSError as error:
            raise RunError(
                f"cannot create the run folder {run.path}: {error.strerror}",
                hint="choose another folder with --runs or HEADWAY_RUNS",
            ) from error
        with umask_of(run.path):
            for folder in (run.events, run.checkpoints, run.logs):
                folder.mkdir()
        return run


def create_private_folder(folder: Path) -> None:
    """Create the folder of all runs, or one beside them, as private as they are; an existing one stays as it is."""
    mode = new_run_mode()
    with suppress(OSError):  # an error is reported by whoever writes into it
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(PRIVATE)
        folder.chmod(mode)  # whatever the umask is


def _taken_hint(run: RunFolder) -> str:
    """Return what to do about a name that is taken: only what the run's state allows."""
    state = summarize(run).state if run.events.is_dir() else None
    waiting = (run.path / "jobs.jsonl").exists()  # an engine will start it
    free = f"choose another name, such as {free_name(run)}"
    if state in ("stopped", "failed") or (state == "interrupted" and not waiting):
        return f"{free}, or `{run.command('resume')}`"
    if state == "running":
        return f"{free}, or `{run.command('stop')}` first"
    return free


def free_name(run: RunFolder) -> str:
    """Return a name like this run's that no run has: demo-2, after demo."""
    stem, _, number = run.name.rpartition("-")
    if not (stem and number.isdecimal() and len(number) < 4):
        stem, number = run.name, "1"
    numbers = range(int(number) + 1, int(number) + 2 + len(list_runs(run.path.parent)))
    names = (f"{stem[: 64 - 1 - len(str(number))]}-{number}" for number in numbers)
    return next(name for name in names if not (run.path.parent / name).exists())


def list_runs(root: Path) -> list[RunFolder]:
    """Return all runs, most recently active first."""
    folders = [RunFolder(path) for path in root.iterdir() if (path / "events").is_dir()] if root.is_dir() else []
    return sorted(folders, key=lambda run: (_active(run), run.name), reverse=True)


def find_run(root: Path, ref: str) -> RunFolder:
    """Return the run with this name or unique prefix, or the `last` active one.

    If no run has the name, it is that of the last one of this name that failed before its first step.
    """
    runs = list_runs(root)
    if ref.startswith(f"{FAILED}/"):
        root, ref = root / FAILED, ref.removeprefix(f"{FAILED}/")
        runs = list_runs(root)
    elif all(run.name != ref for run in runs) and (aside := find_set_aside(root, ref)) is not None:
        return aside
    if not runs:
        raise RunError(f"no runs in {root}", hint="give the folder of runs with --runs or HEADWAY_RUNS", usage=True)
    if ref == "last":
        return runs[0]
    names = [run.name for run in runs]
    matches = [run for run in runs if run.name == ref] or [run for run in runs if ref and run.name.startswith(ref)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(sorted(run.name for run in matches)[:8])
        raise RunError(f"{len(matches)} runs start with {ref!r}: {shown}", hint="give more of the name", usage=True)
    near = difflib.get_close_matches(ref, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names[:3])}"
    hint += f"  ({command(root, 'runs')} lists all)"
    raise RunError(f"no run {ref!r} in {root}", hint=hint, usage=True)


def parse_ref(text: str) -> tuple[str, int | None]:
    """Split RUN@STEP into the run and the step; RUN alone has no step."""
    ref, at, step = text.partition("@")
    if not at:
        return ref, None
    if not (ref and step.isascii() and step.isdigit()):
        raise UsageError(f"expected RUN@STEP, got {text!r}", hint="for example last@200")
    return ref, int(step)


def next_attempt(run: RunFolder) -> int:
    """Return the number of the next attempt: one more than the latest recorded."""
    return max(_attempts(run), default=0) + 1


def _attempts(run: RunFolder) -> list[int]:
    numbers = {path.name.partition("-")[0] for path in run.events.glob("*-*.jsonl")}
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def _active(run: RunFolder) -> int:
    """Return when a run last wrote an event, else when it was created (ns)."""
    times = [path.stat().st_mtime_ns for path in run.events.glob("*.jsonl")]
    return max(times, default=run.path.stat().st_mtime_ns)


# -- runs that failed before their first step


def set_aside(run: RunFolder) -> RunFolder:
    """Move a run out of the way of its name, to `.failed`; return its folder there."""
    folder = run.path.parent / FAILED
    create_private_folder(folder)
    for number in itertools.count(1):
        target = folder / (run.name if number == 1 else f"{run.name}{_COPY}{number}")
        try:
            return RunFolder(run.path.rename(target))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise AssertionError


def take_back(run: RunFolder) -> RunFolder:
    """Give a run that was set aside its name again; raise RunError if another has it now."""
    target = run.path.parent.parent / run.name.partition(_COPY)[0]
    try:
        if target.exists():
            raise FileExistsError
        return RunFolder(run.path.rename(target))
    except OSError:
        raise RunError(
            f"{target} is another run now; {FAILED}/{run.name} cannot have its name again",
            hint=f"headway train --name starts it under another; {run.command('logs')} shows why it failed",
            usage=True,
        ) from None


def is_set_aside(run: RunFolder) -> bool:
    """Whether a run failed before its first step, and was moved to `.failed`."""
    return run.path.parent.name == FAILED


def find_set_aside(root: Path, name: str) -> RunFolder | None:
    """Return the last run of this name that was set aside."""
    runs = list_runs(root / FAILED)
    return next((run for run in runs if name in (run.name, run.name.partition(_COPY)[0])), None)


def has_stepped(run: RunFolder) -> bool:
    """Whether a run has done a step, in any attempt, or saved a state."""
    leaders = [_ends(run, number, "rank-0") for number in _attempts(run)]
    steps = (event for record in leaders for event in record.events if event["kind"] == "step")
    return any(steps) or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


# -- the lock


class RunLock:
    """A run's lock, held by this process."""

    def __init__(self, run: RunFolder, file: int) -> None:
        self._run, self._file = run, file

    def renew(self) -> bool:
        """Take it again after the folder was mounted again; return False if another process has it."""
        try:
            file = os.open(self._run.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        if not _lock_soon(file):
            os.close(file)
            return False
        with suppress(OSError):
            os.close(self._file)
        self._file = file
        self.sign()
        return True

    def sign(self) -> None:
        """Write who holds it."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, to_json({"pid": os.getpid(), "host": socket.gethostname()}), 0)

    def release(self) -> None:
        """Unlock it; where the folder is gone, the kernel does."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._file)


@contextmanager
def lock_run(run: RunFolder, seize: bool = False) -> Iterator[RunLock]:
    """Lock a run for this process; raise RunError if another one holds it. The kernel unlocks it when the process dies.

    The holder of the leader lease may `seize` it from an unreachable process.
    """
    try:
        file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(
            f"cannot lock run {run.name}: {error.strerror}",
            hint="check that its folder exists and is writable",
        ) from error
    try:
        if not seize:
            _lock(run, file)
        elif not _lock_soon(file):
            os.close(file)
            run.lock_file.unlink(missing_ok=True)
            file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _lock(run, file)
    except BaseException:
        os.close(file)
        raise
    lock = RunLock(run, file)
    try:
        lock.sign()
        yield lock
    finally:
        lock.release()


def lock_holder(run: RunFolder) -> int | None:
    """Return the pid of the process that holds a run's lock; None if it is free, 0 if the pid is not recorded."""
    try:
        file = os.open(run.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A short shared lock: it does not block other readers, and `lock_run` retries.
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
    """Take the lock, with retries: `lock_holder` in another process may hold it for a moment."""
    if _lock_soon(file):
        return
    pid, host = _named_in(file)
    elsewhere = f" on {host}" if host not in ("", socket.gethostname()) else ""
    raise RunError(
        f"run {run.name} is in use by process {pid}{elsewhere}",
        hint=f"wait for it, or stop it with `{run.command('stop')}`",
    )


def _named_in(file: int) -> tuple[int, str]:
    """Return the pid and host written in a lock file."""
    try:
        named = from_json(os.pread(file, 4096, 0))
        return int(named["pid"]), str(named["host"])
    except (ValueError, KeyError, TypeError):
        return 0, ""


# -- the state of a run


@dataclass(frozen=True)
class RunSummary:
    """The state of a run, in one row."""

    name: str
    state: RunState
    step: int
    total_steps: int | None
    loss: float | None
    attempts: int
    started: float | None
    """Unix seconds."""
    seconds: float
    """Duration of its attempts, summed."""
    workers: int | None
    device: str
    reason: str
    """Why the last attempt ended, as the agent recorded it."""


def summarize(run: RunFolder, *, locked: bool | None = None) -> RunSummary:
    """Summarize a run from the ends of its records, in constant time for any number of steps.

    `locked` is whether a process holds its lock, where the caller knows.
    """
    attempts = _attempts(run)
    agents = [_ends(run, number, "agent") for number in attempts]
    leaders = [_ends(run, number, "rank-0") for number in attempts]
    agent_events = [event for record in agents for event in record.events]
    start = _last(agent_events, "attempt")
    end = _last(agents[-1].events, "end") if agents else {}
    step, loss = _progress(leaders)
    facts = _last([event for record in leaders for event in record.events], "facts")
    return RunSummary(
        name=run.name,
        state=_state(lock_holder(run) is not None if locked is None else locked, end),
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


def _state(locked: bool, end: Event) -> RunState:
    if locked:
        return "running"
    outcomes: dict[object, RunState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
    return outcomes.get(end.get("outcome"), "interrupted")


def _progress(leaders: list[Record]) -> tuple[int, float | None]:
    """Return the last step that counts and the last loss, from rank 0 of each attempt."""
    step, loss = 0, None
    for record in leaders:
        for event in record.events:
            if event["kind"] in ("resumed", "step"):
                step = _count(event.get("step")) or 0
                loss = event.get("loss", loss)
    return step, loss if isinstance(loss, float | int) else None


def _length_s(agent: Record, leader: Record) -> float:
    """Return how long an attempt lasted: until its end, or its last event."""
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
