"""The runs that are alive on this machine, found by their processes: nothing is written down that could be stale."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway.track import RunFolder

__all__ = ["Alive", "alive", "run_of"]

_AGENT = ("-m", "headway.agent")


@dataclass(frozen=True)
class Alive:
    """A run and its processes."""

    run: RunFolder
    agent: int
    keeper: int | None
    """None when it is gone, and the run about to save and stop."""
    workers: tuple[int, ...]
    spares: int
    memory_bytes: int
    """What all of them have to themselves, and their share of what they share."""
    started: float
    """Unix seconds when the agent was started."""
    user: str


def alive() -> list[Alive]:
    """All runs on this machine whose processes may be seen, the oldest first."""
    return sorted(_all(), key=lambda one: one.started)


def _all() -> Iterator[Alive]:
    for process in psutil.process_iter():
        try:
            run = run_of(process.cmdline())
            if run is not None:
                yield _describe(process, Path(process.cwd(), run))
        except psutil.Error:
            continue  # it ended meanwhile, or may not be looked at


def run_of(command: Sequence[str]) -> str | None:
    """The run's folder if this is an agent's command line, `python -m headway.agent DESCRIPTOR RUN`."""
    return command[4] if len(command) == 5 and tuple(command[1:3]) == _AGENT else None


def _describe(agent: psutil.Process, run: Path) -> Alive:
    children = agent.children(recursive=True)
    names = {child: _name(child) for child in children}
    parent = agent.parent()
    kept = parent is not None and parent.pid != 1
    return Alive(
        run=RunFolder(run),
        agent=agent.pid,
        keeper=parent.pid if parent is not None and kept else None,
        workers=tuple(sorted(child.pid for child, name in names.items() if name.startswith("hw "))),
        spares=sum(name == "hw-spare" for name in names.values()),
        memory_bytes=sum(_memory(process) for process in (agent, *children)),
        started=agent.create_time(),
        user=agent.username(),
    )


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _memory(process: psutil.Process) -> int:
    """The proportional share where the kernel tells it: workers forked from one process share most of their memory."""
    try:
        found = process.memory_full_info()
        return int(getattr(found, "pss", found.rss))
    except psutil.Error:
        return 0
