"""Sweeps are created one at a time; those whose creator died before they were submitted are removed with their runs."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pydantic_core import from_json

from headway.cluster.submit.store_runs import (
    delete_runs,
    is_committed,
)
from headway.cluster.submit.sweeps import MAKING, OF_RUN, READY, RECORD, SWEEP_NAME
from headway.errors import RunError, StateError
from headway.track import RunFolder
from headway.track.access import umask_of
from headway.track.run_folder import create_private_folder

LOCK = "lock"
"""Held in the folder of all sweeps while one is created."""


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, and wait for it if necessary. Whoever holds it may remove the file."""
    locked = False
    while not locked:
        with umask_of(path.parent):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = _is_file_at(path, file)
            if locked:
                yield
        finally:
            os.close(file)


def _is_file_at(path: Path, file: int) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def sweeps_lock(root: Path) -> Iterator[None]:
    """Create sweeps one at a time, so that the creator of an unsubmitted one must be dead. A folder without sweeps is
    removed again."""
    folder = root / ".sweeps"
    create_private_folder(root)
    with ExitStack() as stack:
        try:
            _enter_lock(stack, folder)
        except OSError as error:
            raise RunError(f"cannot write into {folder}: {error.strerror}", hint="choose another --runs") from None
        try:
            yield
        finally:
            with suppress(OSError):  # another process may just create its lock there
                if [entry.name for entry in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


def _enter_lock(stack: ExitStack, folder: Path) -> None:
    """Create the folder of all sweeps and hold its lock; the holder before may remove both."""
    while True:
        create_private_folder(folder)
        folder.mkdir(exist_ok=True)  # raises what prevents it
        with suppress(FileNotFoundError):
            stack.enter_context(exclusive_lock(folder / LOCK))
            return


def remove_unsubmitted(root: Path) -> None:
    """Remove sweeps whose creator died before they were submitted, with their runs; none of those has trained."""
    for folder in (root / ".sweeps").iterdir():
        if not folder.is_dir() or (folder / RECORD).exists():
            continue
        try:
            making = from_json((folder / MAKING).read_bytes())
            names, token = [str(name) for name in making["runs"]], making["token"]
            address, stored = str(making.get("place", "")), dict(making.get("stored", {}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            names, token, address, stored = [], "", "", {}
        if address and not _remove_from_stores(folder, address, stored):
            continue
        for run in (RunFolder(root / name) for name in names if SWEEP_NAME.match(name)):
            belongs = _token(run) == token or not (run.path / "jobs.jsonl").exists()
            if belongs and not any(run.events.glob("*")):
                shutil.rmtree(run.path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_from_stores(folder: Path, address: str, stored: Mapping[str, str]) -> bool:
    """Delete what an unsubmitted sweep has in stores. False if it turns out to be committed, since its creator died
    just after that, or if its store does not answer."""
    try:
        if is_committed(address):
            (folder / READY).replace(folder / RECORD)
            return False
        delete_runs(stored)
    except StateError:
        return False
    return True


def _token(run: RunFolder) -> str | None:
    try:
        return str(from_json((run.path / OF_RUN).read_bytes())["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
