"""Where a model class of the user's own comes from: which version, or which commit; and a copy of it for a run.

Written as `code.json` into the run's folder. Nothing is imported: a package is found as Python would find it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from headway.errors import UsageError
from headway.recipe import Recipe
from headway.track import RunFolder, write_json

__all__ = ["copy_package", "find_package", "record_provenance", "source_version", "sources"]

RECORD, FOLDER = "code.json", "code"
LARGEST = 64 * 2**20
"""Bytes of a package that is copied into each run."""
GIT_S = 20.0


def record_provenance(run: RunFolder, recipe: Recipe, copy: bool) -> Path | None:
    """Write down where the recipe's own class comes from; with `copy`, a folder in the run that has it."""
    if recipe.model.class_ is None:
        return None
    place = recipe.model.class_.partition(":")[0]
    package = find_package(place.partition(".")[0])
    if package is None:
        if copy:
            raise UsageError(
                f"snapshot is on, and there is no package {place.partition('.')[0]} to copy",
                hint="PYTHONPATH=. headway ... finds those of this folder; others must be installed",
            )
        return None  # perhaps it is there where the run will be
    facts = source_version(package)
    folder = copy_package(package, run.path / FOLDER) if copy else None
    write_json(run.path / RECORD, {"format": 1, "class": recipe.model.class_, **facts, "snapshot": copy})
    return folder


def find_package(name: str) -> Path | None:
    """The folder of a package, or the file of a module, where workers would find it: not in the folder that one
    happens to be in."""
    stated = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = os.path.realpath(".")
    places = [entry for entry in sys.path if entry and (os.path.realpath(entry) != here or here in stated)]
    spec = PathFinder.find_spec(name, places)
    if spec is None or spec.origin is None:
        return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    origin = Path(spec.origin)
    return origin.parent if spec.submodule_search_locations else origin


def source_version(package: Path) -> dict[str, Any]:
    """Its version, where it is installed; its commit, where it lies in a repository; and a hash of its sources."""
    facts: dict[str, Any] = {"package": package.stem, "path": str(package), "sha256": _digest(package)}
    if "site-packages" in package.parts or "dist-packages" in package.parts:
        return facts | {"version": _version(package.stem)}
    folder = package if package.is_dir() else package.parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return facts | {"version": _version(package.stem)}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=normal", "--", str(package))
    return facts | {"commit": commit, "dirty": bool(changed)}


def copy_package(package: Path, to: Path) -> Path:
    """Copy a package's files; the folder to import it from."""
    found = sources(package)
    total = sum(path.stat().st_size for path in found)
    if total > LARGEST:
        raise UsageError(
            f"{package} has {total / 2**20:.0f} MiB: too much to be copied into each run",
            hint="keep data out of the package, or leave `snapshot` out of engines.toml",
        )
    for path in found:
        there = to / path.relative_to(package.parent)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, there)
    return to


def sources(package: Path) -> list[Path]:
    """The files of a package in a fixed order, without what is hidden or compiled from them."""
    if package.is_file():
        return [package]
    found = list[Path]()
    for place, folders, files in os.walk(package):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [Path(place) / name for name in sorted(files) if not name.startswith(".")]
    return [path for path in found if path.is_file()]


def _digest(package: Path) -> str:
    known = hashlib.sha256()
    for path in sources(package):
        known.update(f"{path.relative_to(package.parent)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return known.hexdigest()


def _version(name: str) -> str | None:
    """Of the distribution that a package is of."""
    from importlib import metadata  # few runs need it, and it takes longer than the rest of this file

    for distribution in metadata.packages_distributions().get(name, []):
        return metadata.version(distribution)
    return None


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where it says nothing, or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
