"""The runs that are alive on this machine, found by their processes: nothing is written down that could be stale."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway.track import RunFolder

__all__ = ["LiveRun", "list_live_runs", "run_from_cmdline"]

_AGENT = ("-m", "headway.agent")
_ZYGOTE = ("-m", "headway.train.zygote")


@dataclass(frozen=True)
class LiveRun:
    """A run and its processes on this machine."""

    run: RunFolder
    agent: int
    """The one that leads; else the first of those that work for one elsewhere."""
    keeper: int | None
    """None when it is gone, and the run about to save and stop; also of a run that is led elsewhere."""
    led_here: bool
    workers: tuple[int, ...]
    spares: int
    memory_bytes: int
    """What all of them have to themselves, and their share of what they share."""
    started: float
    """Unix seconds when the agent was started."""
    user: str


@dataclass(frozen=True)
class _Found:
    """An agent with the processes that are its own."""

    agent: psutil.Process
    run: Path
    own: tuple[psutil.Process, ...]


def list_live_runs() -> list[LiveRun]:
    """All runs on this machine whose processes may be seen, the oldest first."""
    leaders, nodes = _found()
    groups = [(leader, [node for node in nodes if _same(leader.run, node.run)]) for leader in leaders]
    elsewhere = [node for node in nodes if not any(_same(leader.run, node.run) for leader in leaders)]
    while elsewhere:
        mine = [node for node in elsewhere if _same(elsewhere[0].run, node.run)]
        elsewhere = [node for node in elsewhere if node not in mine]
        groups.append((mine[0], mine))
    found = list[LiveRun]()
    for first, others in groups:
        with suppress(psutil.Error):
            found.append(_describe(first, others, led_here=first in leaders))
    return sorted(found, key=lambda one: one.started)


def run_from_cmdline(command: Sequence[str]) -> str | None:
    """The run's folder if this is an agent's command line, `python -m headway.agent DESCRIPTOR RUN`."""
    return command[4] if len(command) == 5 and tuple(command[1:3]) == _AGENT else None


def _found() -> tuple[list[_Found], list[_Found]]:
    """Agents that lead a run, and those that have a zygote for one."""
    leaders, nodes = list[_Found](), list[_Found]()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            run = run_from_cmdline(command)
            if run is not None:
                leaders.append(_Found(process, Path(process.cwd(), run).resolve(), (process, *_below(process))))
            elif tuple(command[1:3]) == _ZYGOTE and not process.name().startswith("hw"):
                parent, of = process.parent(), _prints_for(process)
                if parent is not None and parent.pid != 1 and of is not None:
                    nodes.append(_Found(parent, of, (parent, process, *_below(process))))
        except psutil.Error:
            continue  # it ended meanwhile, or may not be looked at
    return leaders, nodes


def _below(process: psutil.Process) -> list[psutil.Process]:
    return list(process.children(recursive=True))


def _prints_for(process: psutil.Process) -> Path | None:
    """The run's folder whose log a process prints into."""
    try:
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return None
    return log.parent.parent if log.parent.name == "logs" else None


def _same(one: Path, other: Path) -> bool:
    """Whether two folders are of one run: that of a machine which does not see the other's has the same id."""
    if one == other:
        return True
    try:
        return RunFolder(one).id_file.read_text() == RunFolder(other).id_file.read_text()
    except OSError:
        return False


def _describe(first: _Found, others: Sequence[_Found], led_here: bool) -> LiveRun:
    own = dict.fromkeys(process for one in (first, *others) for process in one.own)
    names = {process: _name(process) for process in own}
    agent, parent = first.agent, first.agent.parent()
    kept = led_here and parent is not None and parent.pid != 1
    return LiveRun(
        run=RunFolder(first.run),
        agent=agent.pid,
        keeper=parent.pid if parent is not None and kept else None,
        led_here=led_here,
        workers=tuple(sorted(process.pid for process, name in names.items() if name.startswith("hw "))),
        spares=sum(name == "hw-spare" for name in names.values()),
        memory_bytes=sum(map(_memory, own)),
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
