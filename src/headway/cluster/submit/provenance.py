"""Records the version or commit of a custom model class, and copies its package into a run.

The record is `code.json` in the run folder. Nothing is imported: packages are located as Python would.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import UsageError
from headway.track import RunFolder, write_json

if TYPE_CHECKING:
    from headway.recipe import Recipe

RECORD, FOLDER = "code.json", "code"
LARGEST = 64 * 2**20
"""Bytes of a package that can be copied into each run."""
GIT_S = 20.0


def record_provenance(run: RunFolder, recipe: "Recipe", copy: bool) -> Path | None:
    """Record where the recipe's custom class comes from. With `copy`, copy its package into the run and return the
    folder."""
    if recipe.model.class_ is None:
        return None
    name = recipe.model.class_.partition(":")[0].partition(".")[0]
    from headway.recipe.find_own_code import find_package  # recipes take a while to import, and commands have none

    package = find_package(name)
    if package is None:
        if copy:
            raise UsageError(
                f"snapshot is on, but package {name} was not found",
                hint="install it, or run PYTHONPATH=. headway ... if it is in this folder",
            )
        return None  # the machines of the run may have it
    facts = source_version(package)
    folder = copy_package(package, run.path / FOLDER) if copy else None
    write_json(run.path / RECORD, {"format": 1, "class": recipe.model.class_, **facts, "snapshot": copy})
    return folder


def source_version(package: Path) -> dict[str, Any]:
    """The version of an installed package, the commit of one in a repository, and a hash of its sources."""
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
    """Copy a package's files, and return the folder to import it from."""
    files = sources(package)
    total = sum(path.stat().st_size for path in files)
    if total > LARGEST:
        raise UsageError(
            f"{package} has {total / 2**20:.0f} MiB: too large to copy into each run",
            hint="move data out of the package, or remove `snapshot` from engines.toml",
        )
    for path in files:
        target = to / path.relative_to(package.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return to


def sources(package: Path) -> list[Path]:
    """The files of a package in a fixed order, without hidden and compiled ones."""
    if package.is_file():
        return [package]
    paths = list[Path]()
    for folder, subfolders, files in os.walk(package):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        paths += [Path(folder) / name for name in sorted(files) if not name.startswith(".")]
    return [path for path in paths if path.is_file()]


def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sources(package):
        digest.update(f"{path.relative_to(package.parent)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    """The version of the distribution that provides a package."""
    from importlib import metadata  # slow to import, and few runs need it

    for distribution in metadata.packages_distributions().get(name, []):
        return metadata.version(distribution)
    return None


def _git(folder: Path, *args: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
