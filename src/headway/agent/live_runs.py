"""The live runs of this machine, found by their processes: nothing is recorded that could become stale."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from headway.track import RunFolder

_AGENT = ("-m", "headway.agent")
_ZYGOTE = ("-m", "headway.train.zygote")


@dataclass(frozen=True)
class LiveRun:
    """A run and its processes on this machine."""

    run: RunFolder
    agent: int
    """The leader; of a run led elsewhere, the first agent here."""
    keeper: int | None
    """The launcher; None if it is gone (the run is about to save and stop) and for a run led elsewhere."""
    led_here: bool
    workers: tuple[int, ...]
    spares: int
    memory_bytes: int
    """Private memory of all processes and their share of shared memory."""
    started: float
    """Unix seconds when the agent started."""
    user: str


@dataclass(frozen=True)
class _AgentProcesses:
    """An agent with its processes."""

    agent: psutil.Process
    run: Path
    processes: tuple[psutil.Process, ...]


def list_live_runs() -> list[LiveRun]:
    """List all runs on this machine whose processes are visible, the oldest first."""
    leaders, nodes = _find_agents()
    groups = [(leader, [node for node in nodes if _works_for(node, leader)]) for leader in leaders]
    elsewhere = [node for node in nodes if not any(_works_for(node, leader) for leader in leaders)]
    while elsewhere:
        group = [node for node in elsewhere if _same_run(elsewhere[0].run, node.run)]
        elsewhere = [node for node in elsewhere if node not in group]
        groups.append((group[0], group))
    runs = list[LiveRun]()
    for first, others in groups:
        with suppress(psutil.Error):
            runs.append(_describe(first, others, led_here=first in leaders))
    return sorted(runs, key=lambda run: run.started)


def run_from_cmdline(command: Sequence[str]) -> str | None:
    """Return the run folder of an agent's command line, `python -m headway.agent DESCRIPTOR RUN`; else None."""
    return command[4] if len(command) == 5 and tuple(command[1:3]) == _AGENT else None


def _find_agents() -> tuple[list[_AgentProcesses], list[_AgentProcesses]]:
    """Find the agents that lead a run, and those that have a zygote for one."""
    leaders, nodes = list[_AgentProcesses](), list[_AgentProcesses]()
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            run = run_from_cmdline(command)
            if run is not None:
                path = Path(process.cwd(), run).resolve()
                leaders.append(_AgentProcesses(process, path, (process, *process.children(recursive=True))))
            elif tuple(command[1:3]) == _ZYGOTE and not process.name().startswith("hw"):
                parent, log_run = process.parent(), _run_of_log(process)
                if parent is not None and parent.pid != 1 and log_run is not None:
                    processes = (parent, process, *process.children(recursive=True))
                    nodes.append(_AgentProcesses(parent, log_run, processes))
        except psutil.Error:
            continue  # it ended meanwhile, or belongs to another user
    return leaders, nodes


def _run_of_log(process: psutil.Process) -> Path | None:
    """Return the run folder to whose logs a process prints."""
    try:
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return None
    return log.parent.parent if log.parent.name == "logs" else None


def _works_for(node: _AgentProcesses, leader: _AgentProcesses) -> bool:
    """Whether a node's agent is the leader itself, whatever its folder is called by now, or is of the same run."""
    return node.agent == leader.agent or _same_run(leader.run, node.run)


def _same_run(folder: Path, other: Path) -> bool:
    """Whether two folders are of one run: machines that share no folder have copies with the same id."""
    if folder == other:
        return True
    try:
        return RunFolder(folder).id_file.read_text() == RunFolder(other).id_file.read_text()
    except OSError:
        return False


def _describe(first: _AgentProcesses, others: Sequence[_AgentProcesses], led_here: bool) -> LiveRun:
    names = {process: _name(process) for agent in (first, *others) for process in agent.processes}
    agent, parent = first.agent, first.agent.parent()
    return LiveRun(
        run=RunFolder(first.run),
        agent=agent.pid,
        keeper=parent.pid if led_here and parent is not None and parent.pid != 1 else None,
        led_here=led_here,
        workers=tuple(sorted(process.pid for process, name in names.items() if name.startswith("hw "))),
        spares=sum(name == "hw-spare" for name in names.values()),
        memory_bytes=sum(map(_memory, names)),
        started=agent.create_time(),
        user=agent.username(),
    )


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _memory(process: psutil.Process) -> int:
    """Return the proportional set size if the kernel has it: forked workers share most of their memory."""
    try:
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))
    except psutil.Error:
        return 0
