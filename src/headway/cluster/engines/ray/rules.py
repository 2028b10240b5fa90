"""The decisions of the Ray engine, without Ray: bundles, what can never fit, and what follows when tasks have ended."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.cluster.engines.engine import (
    CANCELLED,
    REQUEUE,
    LaunchRequest,
    Machine,
    State,
    combined_exit_status,
    did_you_mean,
    exit_reason,
    state_after_exit,
)
from headway.errors import UsageError, plural

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
"""Ray's placement strategies: one process per machine, the same if possible, few machines if possible, one machine."""
SITE = {
    "address": "HOST:PORT of the cluster, or local: one on this machine",
    "strategy": "how processes are placed: STRICT_SPREAD, SPREAD, PACK or STRICT_PACK",
    "grows": "yes if the cluster adds nodes on demand",
}
"""Settings of a Ray cluster and what they mean."""
WELL_S = 10.0
"""After a start that lasted this long, the next one need not wait."""
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class TaskExit:
    """How the task of one machine ended."""

    machine: int
    exit_status: int | None = None
    lost: str = ""
    """Why it has no exit status, if its machine or its Ray worker was lost."""
    error: str = ""
    """Why it could not be started at all."""
    reported: int | None = None
    """The exit status of the whole job, if its command reported one."""
    suspects: tuple[str, ...] = ()
    """Machines that the next start should avoid, according to its command."""


@dataclass(frozen=True)
class NextState:
    """The state of a job after a start is over; `waiting` means that it is restarted."""

    state: State
    reason: str = ""
    exit_status: int | None = None


# -- resources


def bundle(request: LaunchRequest) -> dict[str, float]:
    """The resources reserved on each machine."""
    resources: dict[str, float] = {"CPU": request.cpus}
    if request.gpus:
        resources["GPU"] = request.gpus
    if request.memory_bytes:
        resources["memory"] = request.memory_bytes
    return resources


def placement_strategy(request: LaunchRequest) -> str:
    """Ray's placement strategy for the bundles; UsageError for settings that the engine does not have."""
    unknown = sorted(set(request.site) - set(SITE))
    if unknown:
        raise UsageError(f"the Ray engine has no setting {unknown[0]!r}", hint=did_you_mean(unknown[0], SITE))
    strategy = request.site.get("strategy", "STRICT_SPREAD").upper().replace("-", "_")
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown placement strategy {strategy!r}", hint=f"one of {', '.join(STRATEGIES)}")
    return strategy


def resource_shape(request: LaunchRequest) -> tuple[Any, ...]:
    """Equal for jobs that can use each other's placement groups."""
    return bundle(request), request.machines, placement_strategy(request), sorted(request.avoid)


def why_never_fits(request: LaunchRequest, machines: Sequence[Machine]) -> str | None:
    """Why a request can never be satisfied on these machines; None if it can, now or later."""
    usable = [machine for machine in machines if machine.state != "away" and machine.name not in request.avoid]
    counts = [_processes(request, machine) for machine in usable]
    match placement_strategy(request):
        case "STRICT_SPREAD":
            capacity, where = sum(map(bool, counts)), ""
        case "STRICT_PACK":
            capacity, where = max(counts, default=0), " on one machine"
        case _:
            capacity, where = sum(counts), " side by side"
    if capacity >= request.machines:
        return None
    asked = f"{_count(request.machines, 'machine')} with {_resources(request.gpus, request.cpus, request.memory_bytes)}"
    without = f" (without {', '.join(request.avoid)})" if request.avoid else ""
    gpus, cpus, memory = max(((m.gpus, m.cpus, m.memory_bytes) for m in usable), default=(0, 0, 0))
    return (
        f"it asks for {asked} each{where}; the {plural(len(usable), 'machine')}{without} "
        f"{'has' if len(usable) == 1 else 'have'} room for {capacity}; "
        f"the largest has {_resources(gpus, cpus, memory)}"
    )


def machines_to_avoid(request: LaunchRequest, suspects: Sequence[str], machines: Sequence[Machine]) -> tuple[str, ...]:
    """Machines that a job must not get: those it was submitted to avoid, and its suspects as long as the others are
    enough."""
    avoid = tuple(dict.fromkeys((*request.avoid, *suspects)))
    return request.avoid if why_never_fits(replace(request, avoid=avoid), machines) else avoid


def _processes(request: LaunchRequest, machine: Machine) -> int:
    """How many of the processes a machine could hold if it were idle."""
    counts = [machine.cpus // request.cpus]
    if request.gpus:
        counts.append(machine.gpus // request.gpus)
    if request.memory_bytes:
        counts.append(machine.memory_bytes // request.memory_bytes)
    return min(counts)


def _resources(gpus: int, cpus: int, memory_bytes: int | None) -> str:
    memory = f"{memory_bytes / 2**30:.3g} GiB" if memory_bytes else ""
    return ", ".join(filter(None, (_count(gpus, "GPU") if gpus else "", _count(cpus, "core"), memory)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def machines_from_nodes(nodes: Sequence[dict[str, Any]], free: dict[str, dict[str, float]]) -> dict[str, Machine]:
    """Ray's nodes as machines, by Ray's ids; without dead nodes, which Ray lists for ever, and heads without cores."""
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    names = {node["NodeID"]: _node_name(node) for node in alive}
    uses = Counter(names.values())
    machines = {}
    for node in alive:
        number, total = node["NodeID"], node["Resources"]
        left = free.get(number, total)
        gpus, cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
        busy = left.get("GPU", 0) < gpus or left.get("CPU", 0) < cpus
        machines[number] = Machine(
            name=names[number] if uses[names[number]] == 1 else f"{names[number]}-{number[:6]}",
            state="busy" if busy else "free",
            gpus=gpus,
            gpus_free=int(left.get("GPU", 0)),
            cpus=cpus,
            memory_bytes=int(total.get("memory", 0)),
        )
    return machines


def _node_name(node: dict[str, Any]) -> str:
    """The name it was given, else its host name."""
    name = str(node.get("NodeName") or "")
    return name if name and name != node["NodeManagerAddress"] else str(node["NodeManagerHostname"])


# -- the end of a start


def task_exit(rank: int, report: Mapping[str, Any]) -> TaskExit:
    """What a task returned, as a TaskExit."""
    return TaskExit(
        rank,
        exit_status=report.get("exit"),
        lost=report.get("lost", ""),
        error=report.get("error", ""),
        reported=report.get("said"),
        suspects=tuple(report.get("suspects", ())),
    )


def must_stop(exits: Sequence[TaskExit], spares: int) -> bool:
    """Whether the tasks that still run must stop: one could not start, or more machines were lost than are spare."""
    return any(task.error for task in exits) or sum(bool(task.lost) for task in exits) > spares


def next_state(
    exits: Sequence[TaskExit],
    names: Sequence[str],
    *,
    cancelled: bool,
    limit_s: float | None,
    signalled_after_s: float | None = None,
) -> NextState:
    """The state of a job whose tasks have all ended. `limit_s` is set if they were stopped at their time limit,
    `signalled_after_s` is when they first received SIGUSR1 after their start."""
    lost = lost_machine(exits, names)
    error = next((task.error for task in exits if task.error), None)
    reported = combined_exit_status(task.reported for task in exits if task.reported is not None)
    if reported == 0 or (reported == REQUEUE and not cancelled):
        state: State = "waiting" if reported else "finished"
        return NextState(state, "; ".join(filter(None, (lost, exit_reason(state, reported)))), reported)
    if cancelled and (lost or error):
        return NextState("cancelled", CANCELLED)
    if error is not None:
        return NextState("failed", error)
    if lost:
        return NextState("waiting", f"{lost}; waiting to be restarted")
    worst = max(exits, key=lambda task: task.exit_status or 0)
    status = worst.exit_status or 0
    state = state_after_exit(status, cancelled, signalled_after_s)
    reason = exit_reason(state, status, _machine_name(names, worst.machine))
    if state == "failed" and limit_s is not None:
        reason = f"killed at its time limit of {limit_s:g} s"
    return NextState(state, reason, status)


def lost_machine(exits: Sequence[TaskExit], names: Sequence[str]) -> str:
    """Which machine was lost, and why, in a sentence; empty if none was."""
    return next((f"{_machine_name(names, task.machine)} was lost ({task.lost})" for task in exits if task.lost), "")


def _machine_name(names: Sequence[str], machine: int) -> str:
    return names[machine] if machine < len(names) and names[machine] else f"machine {machine}"


def restart_delay_s(short_starts: int) -> float:
    """How long to wait before the next start after that many short ones in a row: exponential backoff."""
    return 0.0 if short_starts < 3 else min(LONGEST_PAUSE_S, 2.0 ** (short_starts - 3))
