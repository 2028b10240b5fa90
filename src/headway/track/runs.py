"""Runs by name: make one, list and find them, set aside those that failed before their first step."""

import difflib
import errno
import itertools
import re
import secrets
from pathlib import Path

from headway.errors import RunError, UsageError
from headway.track.access import PRIVATE, new_run_mode, umask_of
from headway.track.run_folder import FAILED, RunFolder, command, create_private_folder
from headway.track.run_summary import attempt_numbers, ends_of, summarize

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COPY = "~"  # between the name of a failed run and its number, if there are several; no run's name has one


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
    return max(attempt_numbers(run), default=0) + 1


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
    leaders = [ends_of(run, number, "rank-0") for number in attempt_numbers(run)]
    steps = (event for record in leaders for event in record.events if event["kind"] == "step")
    return any(steps) or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))
