"""The logs of the jobs of a node, and where they are: on request they go to users who see no folder of this machine.

<node>/logs/
  <start>.log     JOB-START-RANK: here, if its job's folder is not on this machine
  <start>.json    else the job's folder, which has the log, and the Unix user who wrote it

Nothing else is ever read. A job can change what is in its folder, so no link below that folder is followed, and another
user's log must be a plain file of that user.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pwd import struct_passwd
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from headway.cluster.engines.scripts import log_folder, log_path, replace_file
from headway.cluster.service.messages import parse_start_key, start_folder
from headway.errors import EngineError

KEPT_S = 30 * 86400.0
"""A log that nothing was written to for so long is removed from here."""
PRUNE_S = 3600.0
PART_BYTES = 128 * 2**10


class NodeLogs:
    """Where the logs of a node's starts are; `clock` returns Unix seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._prune_at = 0.0

    def place(self, key: str, folder: Path | None, user: struct_passwd | None) -> Path:
        """Choose where the log of a start will be, and remember it. `folder` is that of the job, if it is on this
        machine; `user` is who runs the job, unless that is this process's."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._prune()
        if folder is None:
            return self._file(key, "log")
        owner = None if user is None else user.pw_uid
        replace_file(self._file(key, "json"), to_json({"folder": str(folder), "owner": owner}).decode())
        return log_in(folder, key)

    def open(self, key: str) -> BinaryIO:
        """The log of a start that ran here; EngineError if it is not there any more."""
        job, start, rank = parse_start_key(key)
        what = f"the log of start {start} of job {job}, rank {rank},"
        try:
            with contextlib.suppress(FileNotFoundError):
                return self._file(key, "log").open("rb")
            try:
                place: dict[str, Any] = from_json(self._file(key, "json").read_bytes())
            except FileNotFoundError:
                raise EngineError(f"{what} is not on this node", hint="it may have been removed") from None
            folder = Path(place["folder"])
            return _open_inside(folder, log_in(folder, key).relative_to(folder).parts, place["owner"])
        except FileNotFoundError as error:
            raise EngineError(f"{what} is gone: {error.filename} was removed") from None
        except OSError as error:
            raise EngineError(f"{what} cannot be read: {error.strerror}") from None

    def parts(self, key: str, runs: Callable[[], bool], poll_s: float) -> Iterator[bytes]:
        """Yield the log of a start; for as long as it `runs` what comes, and an empty part where nothing does."""
        with self.open(key) as log:
            while True:
                more = runs()  # before reading, so that the last lines are not missed
                while part := log.read(PART_BYTES):
                    yield part
                if not more:
                    return
                yield b""
                time.sleep(poll_s)

    def _file(self, key: str, kind: str) -> Path:
        parse_start_key(key)
        return self._folder / f"{start_folder(key)}.{kind}"

    def _prune(self) -> None:
        """Once per hour, remove what is old."""
        now = self._clock()
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < now - KEPT_S:
                path.unlink(missing_ok=True)


def is_here(folder: Path) -> bool:
    """Whether a job's folder is on this machine: one that only other users see is."""
    try:
        return folder.is_dir()
    except PermissionError:
        return True


def log_in(folder: Path, key: str) -> Path:
    """The log of a start in its job's folder."""
    job, start, rank = parse_start_key(key)
    return log_path(log_folder(folder, job), start, rank)


def _open_inside(folder: Path, parts: tuple[str, ...], owner: int | None) -> BinaryIO:
    """Open a plain file below a folder, through no link."""
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = below
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
    finally:
        os.close(above)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or owner not in (None, facts.st_uid):
        os.close(file)
        raise EngineError(f"{folder.joinpath(*parts)} is not the log of a job: it was replaced")
    return os.fdopen(file, "rb")
