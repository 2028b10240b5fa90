"""Code that came with a job: kept under its SHA-256, fetched by the nodes that run it, unpacked into their scratch.

An archive is whatever a user sent. Only plain files and folders below the target are made, up to a number and a size.
"""

import hashlib
import io
import os
import pwd
import tarfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from headway.errors import UsageError

KEPT_S = 30 * 86400.0
"""An archive that was not requested for so long is removed."""
MOST_FILES, MOST_UNPACKED = 20_000, 512 * 2**20
_DIGEST = 64


class CodeStore:
    """Archives in a folder, each under its digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, digest: str, data: bytes) -> None:
        """Keep an archive; UsageError if it is not what its digest says."""
        check_digest(digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise UsageError(f"the uploaded code is not {digest}", hint="it was damaged on its way: submit again")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_old()
        partial = self._folder / f".{digest}.{os.getpid()}"
        partial.write_bytes(data)
        partial.replace(self._folder / digest)

    def get(self, digest: str) -> bytes:
        """An archive; UsageError if it is not there."""
        check_digest(digest)
        try:
            data = (self._folder / digest).read_bytes()
            os.utime(self._folder / digest)
        except FileNotFoundError:
            raise UsageError(f"code {digest[:12]} is not kept any more", hint="submit the job again") from None
        return data

    def _remove_old(self) -> None:
        for path in self._folder.iterdir():
            if path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink(missing_ok=True)


def check_digest(digest: str) -> None:
    """Raise UsageError for what is no SHA-256: it becomes the name of a file."""
    if len(digest) != _DIGEST or not set(digest) <= set("0123456789abcdef"):
        raise UsageError(f"{digest!r} is no SHA-256", hint="headway submit --upload makes it")


def cached(store: CodeStore, digest: str, fetch: Callable[[str], bytes]) -> bytes:
    """An archive from a node's own store, or else from the service."""
    try:
        return store.get(digest)
    except UsageError:
        data = fetch(digest)
        store.put(digest, data)
        return data


def unpack(data: bytes, target: Path, user: pwd.struct_passwd | None = None) -> None:
    """Unpack an archive into a new folder, for a user; UsageError if there is anything in it but files and folders."""
    target.mkdir(mode=0o700)
    left = MOST_UNPACKED
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|gz") as archive:
            for number, entry in enumerate(archive):
                left -= max(entry.size, 0)
                if number >= MOST_FILES or left < 0:
                    raise UsageError(
                        f"the uploaded code has more than {MOST_FILES} files or {MOST_UNPACKED // 2**20} MiB"
                    )
                _unpack_entry(archive, entry, target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"the uploaded code cannot be unpacked: {error}", hint="submit the job again") from None
    if user is not None:
        for folder, _, files in os.walk(target):
            for path in (Path(folder), *(Path(folder, name) for name in files)):
                os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def _unpack_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    name = PurePosixPath(entry.name)
    if name.is_absolute() or ".." in name.parts or not (entry.isreg() or entry.isdir()):
        raise UsageError(f"the uploaded code has {entry.name!r} in it, which is no file or folder below its own")
    path = target / name
    if entry.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(entry)
    assert source is not None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700 & (entry.mode | 0o600))
    with os.fdopen(descriptor, "wb") as file:
        while block := source.read(2**20):
            file.write(block)
