"""Control groups of starts: their CPUs and memory are limits, and whatever they leave behind can be found and killed.

Version 2 where it is mounted with its controllers, else version 1; the folder is that of root, or one delegated to us.
"""

import contextlib
import hashlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MOST_PROCESSES = 16384
"""Of one start."""
_PERIOD_US = 100_000


@dataclass(frozen=True)
class Cgroups:
    """Where the control groups of a node's starts are: one folder per hierarchy."""

    version: int
    folders: dict[str, Path]
    """By controller; with version 2 all are the same."""

    def create(self, key: str, cpus: float, memory_bytes: int | None) -> list[Path]:
        """Make the group of a start, and return the files that a process enters it by. OSError if it cannot be."""
        for folder in self._of(key):
            folder.mkdir(parents=True, exist_ok=True)
        quota = int(cpus * _PERIOD_US)
        limits = (
            [("cpu", "cpu.max", f"{quota} {_PERIOD_US}"), ("pids", "pids.max", str(MOST_PROCESSES))]
            if self.version == 2
            else [("cpu", "cpu.cfs_quota_us", str(quota)), ("pids", "pids.max", str(MOST_PROCESSES))]
        )
        if memory_bytes is not None:
            limits.append(("memory", "memory.max" if self.version == 2 else "memory.limit_in_bytes", str(memory_bytes)))
        for controller, file, value in limits:
            (self.folders[controller] / key / file).write_text(value)
        return [folder / "cgroup.procs" for folder in self._of(key)]

    def kill(self, key: str) -> bool:
        """Kill what is in the group of a start; whether nothing was left."""
        left = set[int]()
        for folder in self._of(key):
            with contextlib.suppress(OSError):
                left |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def remove(self, key: str) -> None:
        """Remove the group of a start in which nothing is left."""
        for folder in self._of(key):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Remove all groups in which nothing is left."""
        for base in set(self.folders.values()):
            for folder in [*base.glob("*/"), base]:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _of(self, key: str) -> list[Path]:
        return list(dict.fromkeys(folder / key for folder in self.folders.values()))


def find_cgroups(owner: Path, root: Path = ROOT) -> Cgroups | None:
    """The control groups that a node whose state is in `owner` can use; None if there are none."""
    name = f"headway-{hashlib.sha256(str(owner).encode()).hexdigest()[:8]}"
    for version, find in ((2, _unified), (1, _legacy)):
        with contextlib.suppress(OSError):
            folders = find(root, name)
            if folders is not None:
                return Cgroups(version, folders)
    return None


def _unified(root: Path, name: str) -> dict[str, Path] | None:
    wanted = ("cpu", "memory", "pids")
    available = (root / "cgroup.controllers").read_text().split()
    if not set(wanted) <= set(available):
        return None
    enable, base = " ".join(f"+{controller}" for controller in wanted), root / name
    (root / "cgroup.subtree_control").write_text(enable)
    base.mkdir(exist_ok=True)
    (base / "cgroup.subtree_control").write_text(enable)
    return dict.fromkeys(wanted, base)


def _legacy(root: Path, name: str) -> dict[str, Path] | None:
    folders = {controller: root / controller / name for controller in ("cpu", "memory", "pids")}
    if not all(folder.parent.is_dir() for folder in folders.values()):
        return None
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    return folders
