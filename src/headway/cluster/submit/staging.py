"""A virtual environment packed once beside the runs, and unpacked once on each machine, on a disk of its own.

runs/.code/
  venv-<key>.tar        the environment, and the folders outside of it that it imports from (PYTHONPATH, editable ones)
  venv-<key>.sha256     what must come out of it
  start-<key>.sh        unpacks it where this machine has not, and starts its python with the words that follow

The key is a hash of what is installed (each distribution's RECORD) and of the sources outside. A virtual environment
that has moved works when its python is started by its new path: that finds pyvenv.cfg beside it, and so its packages.
The interpreter behind it is not packed: it lies at the same path on all machines, as that of the system does.
"""

import fcntl
import hashlib
import io
import os
import shlex
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.cluster.submit.provenance import sources
from headway.errors import UsageError

__all__ = ["VenvArchive", "start_script", "venv_archive", "write_archive"]

LARGEST_OUTSIDE = 512 * 2**20
"""Bytes of one folder outside of the environment: what is larger holds more than code."""


@dataclass(frozen=True)
class VenvArchive:
    """A packed environment: what it is made of, and where it lies."""

    key: str
    venv: Path
    outside: tuple[Path, ...]
    """Folders that are imported from and lie elsewhere, the first one first."""
    place: Path

    @property
    def archive(self) -> Path:
        """The packed environment."""
        return self.place / f"venv-{self.key}.tar"

    @property
    def digest(self) -> Path:
        """The archive's SHA-256."""
        return self.place / f"venv-{self.key}.sha256"

    @property
    def start(self) -> Path:
        """The script that starts its python."""
        return self.place / f"start-{self.key}.sh"


def venv_archive(runs: Path, venv: Path | None = None, python_path: str | None = None) -> VenvArchive:
    """What this process's environment would be packed as; nothing is written."""
    venv = venv or Path(sys.prefix)
    if not (venv / "pyvenv.cfg").exists():
        raise UsageError(
            f'code is "staged", and {venv} is no virtual environment',
            hint="submit with the python of one, or leave `code` out of engines.toml",
        )
    stated = os.environ.get("PYTHONPATH", "") if python_path is None else python_path
    outside = tuple(dict.fromkeys([*_folders(stated.split(os.pathsep)), *_editable(venv)]))
    return VenvArchive(_key(venv, outside), venv, outside, runs.absolute() / ".code")


def write_archive(packed: VenvArchive, stage_to: str) -> None:
    """Have the archive and its script there; done once, whoever comes first."""
    packed.place.mkdir(parents=True, exist_ok=True)
    with (packed.place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not packed.digest.exists():
            beside = packed.archive.with_suffix(".partial")
            digest = _write(packed, beside)
            beside.replace(packed.archive)
            _replace(packed.digest, f"{digest}\n")
        _replace(packed.start, start_script(packed, stage_to))


def start_script(packed: VenvArchive, stage_to: str) -> str:
    """What a machine runs: pure. `stage_to` is a folder there; its variables are the machine's."""
    outside = ":".join(f"$own/outside/{number}" for number in range(len(packed.outside)))
    lines = [
        "#!/bin/bash",
        "# Unpacks a virtual environment once on each machine, and starts its python. Written by Headway.",
        'fail() { echo "headway: $*" >&2; exit 1; }',
        f'base="{stage_to}/headway-$(id -u)"',
        f'own="$base/{packed.key}"',
        f"archive={shlex.quote(str(packed.archive))}",
        f"digest={shlex.quote(str(packed.digest))}",
        '(umask 077; mkdir -p -- "$base") || fail "$base cannot be made: set stage_to in engines.toml"',
        '[ -O "$base" ] && [ ! -L "$base" ] || fail "$base is somebody else\'s: set stage_to in engines.toml"',
        'exec 8>>"$own.lock" && flock 8 || fail "$own.lock cannot be locked"',
        'if [ ! -e "$own/.whole" ]; then',
        '  rm -rf -- "$own" "$own.partial" && mkdir -- "$own.partial" || fail "$own cannot be made"',
        '  found=$(sha256sum <"$archive") || fail "$archive cannot be read"',
        '  [ "${found%% *}" = "$(cat "$digest")" ] || fail "$archive is damaged: remove it and its .sha256"',
        '  tar -xf "$archive" -C "$own.partial" --no-same-owner || fail "$archive cannot be unpacked to $own.partial"',
        '  touch "$own.partial/.whole" && mv -- "$own.partial" "$own" || fail "$own cannot be made"',
        "fi",
        "exec 8>&-",
        '[ -x "$own/bin/python" ] || fail "$(readlink -f "$own/bin/python") is not on this machine"',
        "unset PYTHONHOME",
        f'export VIRTUAL_ENV="$own" PYTHONPATH="${{HEADWAY_CODE:+$HEADWAY_CODE:}}{outside}"',
        'exec "$own/bin/python" "$@"',
    ]
    return "\n".join(lines) + "\n"


def _key(venv: Path, outside: tuple[Path, ...]) -> str:
    """A hash of what is installed, and of what lies outside."""
    known = hashlib.sha256(f"1\n{sys.version}\n{(venv / 'pyvenv.cfg').read_text()}".encode())
    for site in sorted(venv.glob("lib/python*/site-packages")):
        for record in sorted([*site.glob("*.dist-info/RECORD"), *site.glob("*.pth")]):
            known.update(f"{record.relative_to(venv)}\n".encode() + record.read_bytes())
    for folder in outside:
        for path in _small(folder):
            known.update(f"{path.relative_to(folder)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
        known.update(b"\0")
    return known.hexdigest()[:16]


def _write(packed: VenvArchive, path: Path) -> str:
    """Write the archive; its SHA-256."""
    with path.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|") as archive:
            for entry in sorted(packed.venv.iterdir()):
                archive.add(entry, entry.name)  # compiled modules too: they go by the time of their source, which stays
            for number, folder in enumerate(packed.outside):
                for source in _small(folder):
                    archive.add(source, f"outside/{number}/{source.relative_to(folder)}", recursive=False)
        file.flush()
        os.fsync(file.fileno())
    return hashed.digest.hexdigest()


class _Hashed(io.RawIOBase):
    """A file that knows the hash of what was written."""

    def __init__(self, file: "io.BufferedWriter") -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write, and know it."""
        self.digest.update(data)
        return self._file.write(data)


def _small(folder: Path) -> list[Path]:
    """The files of a folder of code; UsageError for one that holds more."""
    found = sources(folder)
    total = sum(path.stat().st_size for path in found)
    if total > LARGEST_OUTSIDE:
        raise UsageError(
            f"{folder} is on PYTHONPATH and has {total / 2**30:.1f} GiB: too much to be staged",
            hint="install what is needed into the virtual environment, or leave it out of PYTHONPATH",
        )
    return found


def _folders(stated: list[str]) -> Iterator[Path]:
    for text in stated:
        if text and Path(text).is_dir():
            yield Path(text).absolute()


def _editable(venv: Path) -> Iterator[Path]:
    """Folders elsewhere that the environment's own files lead to."""
    for file in sorted(venv.glob("lib/python*/site-packages/*.pth")):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith(("import ", "#"))]
        yield from (path for path in _folders(lines) if not path.is_relative_to(venv))


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)
