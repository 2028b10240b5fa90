"""Renames and deletes runs that nothing works on, and finds runs by name or pattern."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from headway.errors import RunError, UsageError
from headway.track.files import read_recipe
from headway.track.run_folder import FAILED, RunFolder, command
from headway.track.run_lock import RunLock, lock_run
from headway.track.run_summary import summarize
from headway.track.runs import RUN_NAME, find_run, list_runs

DELETED = ".deleted"
"""Folder, beside all runs, that runs are moved into before their files are removed, so that no half run is listed."""


def match_runs(root: Path, refs: Sequence[str], *, whole: bool = False) -> list[RunFolder]:
    """Return the runs that names, unique prefixes, `last` or patterns such as demo-* stand for, each once; only `whole`
    names, for what changes runs: the second of two equal commands must not change another run."""
    listed: list[RunFolder] | None = None
    runs = dict[Path, RunFolder]()
    for ref in refs:
        if not any(character in ref for character in "*?["):
            run = find_whole(root, ref) if whole else find_run(root, ref)
            runs[run.path] = run
            continue
        listed = list_runs(root) if listed is None else listed
        matching = [run for run in listed if fnmatchcase(run.name, ref)]
        if not matching:
            raise RunError(f"no run matches {ref!r} in {root}", hint=f"{command(root, 'runs')} lists all", usage=True)
        runs |= {run.path: run for run in sorted(matching, key=lambda run: run.name)}
    return list(runs.values())


def find_whole(root: Path, ref: str) -> RunFolder:
    """Return the run with this name, or `last`; raise RunError for the beginning of a name."""
    run = find_run(root, ref)
    if ref not in ("last", run.name, f"{FAILED}/{run.name}"):
        raise RunError(f"no run {ref!r} in {root}", hint=f"give the whole name: {run.name}?", usage=True)
    return run


def rename_run(run: RunFolder, name: str) -> RunFolder:
    """Give a run another name; raise RunError if it is live, or its store has the old name."""
    if not RUN_NAME.fullmatch(name) or name == "last":
        hint = "use up to 64 letters, digits, dots, dashes and underscores; start with a letter or digit; not `last`"
        raise UsageError(f"invalid run name {name!r}", hint=hint)
    target = run.path.with_name(name)
    if _has_store(run):
        raise RunError(f"run {run.name} cannot be renamed: its object store has it under this name", usage=True)
    with _locked(run, "rename"):
        if target.exists() or target.is_symlink():
            raise RunError(f"run {name} already exists", hint="choose another name", usage=True)
        _move(run, target)
    return RunFolder(target)


def delete_run(run: RunFolder, *, other_machines: Callable[[RunFolder], bool] = lambda _: False) -> None:
    """Delete a run's folder; raise RunError if it is live, or waits to be started.

    `other_machines` tells whether machines that do not share the folder may be working on it.
    """
    from headway.track.registry import names_of

    named = names_of(run)
    if named:
        name, step = named[0]
        hint = f"{command(run.path.parent, 'model rm', name)} first, or give the name to another model"
        raise RunError(f"run {run.name} has a named model: {name} is {run.name}@{step}", hint=hint, usage=True)
    state = summarize(run).state
    waits = state == "interrupted" and (run.path / "jobs.jsonl").exists()
    if waits or (state != "finished" and other_machines(run)):
        hint = f"`{run.command('cancel')}` first"
        raise RunError(f"run {run.name} is submitted: an engine may start it", hint=hint, usage=True)
    trash = run.path.parent / DELETED
    if run.path.is_symlink():
        run.path.unlink()
        return
    with _locked(run, "remove"):
        with contextlib.suppress(OSError):
            trash.mkdir(mode=0o700, exist_ok=True)
        _move(run, trash / f"{run.name}-{secrets.token_hex(4)}")
    empty_trash(run.path.parent)


def empty_trash(root: Path) -> None:
    """Remove the files of deleted runs, those that a killed delete left included."""
    shutil.rmtree(root / DELETED, ignore_errors=True)


def size_of(run: RunFolder) -> int:
    """Return how many bytes a run's files have."""
    total = 0
    for folder, _, names in os.walk(run.path):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(folder, name).lstat().st_size
    return total


def _has_store(run: RunFolder) -> bool:
    with contextlib.suppress(RunError):
        return read_recipe(run).checkpoint.store is not None
    return False


@contextlib.contextmanager
def _locked(run: RunFolder, verb: str) -> Iterator[RunLock]:
    """Hold a run's lock, so that nothing starts to work on it meanwhile."""
    try:
        with lock_run(run) as lock:
            yield lock
    except RunError as error:
        raise RunError(f"cannot {verb}: {error.message}", hint=error.hint, usage=True) from error


def _move(run: RunFolder, target: Path) -> None:
    try:
        run.path.rename(target)
    except OSError as error:
        raise RunError(
            f"cannot move {run.path}: {error.strerror}", hint="check that its parent folder is writable"
        ) from error
