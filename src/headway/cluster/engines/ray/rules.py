"""What the Ray engine decides, without Ray: bundles, what can never fit, and what follows when processes have ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.cluster.engines.engine import REQUEUE, LaunchRequest, Machine, State, end_of, state_after_exit
from headway.errors import UsageError

__all__ = [
    "STRATEGIES",
    "NextState",
    "TaskExit",
    "bundle",
    "lost_one",
    "machines_of",
    "next_state",
    "pause_s",
    "strategy_of",
    "why_never_fits",
]

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
"""Ray's own words: each process on a machine of its own, if possible so, on few machines if possible, on one."""
SITE = {
    "address": "HOST:PORT of the cluster, or local: one of this machine alone",
    "strategy": "how processes are placed: STRICT_SPREAD, SPREAD, PACK or STRICT_PACK",
    "grows": "yes where the cluster adds nodes when they are asked for",
}
"""What can be set for a cluster, and what it means."""
WELL_S = 10.0
"""A start that lasted so long was no mistake: the next one need not wait."""
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class TaskExit:
    """How the process of one machine ended."""

    machine: int
    exit_status: int | None = None
    lost: str = ""
    """Why nothing is known of it, where its machine or what watched it there went away."""
    error: str = ""
    """Why it could not be started at all."""
    said: int | None = None
    """How the whole ended, where its command knew."""
    suspects: tuple[str, ...] = ()
    """Machines that its command wants the next start to do without."""


@dataclass(frozen=True)
class NextState:
    """What a job is after a start of it is over; `waiting` is one that is started again."""

    state: State
    reason: str = ""
    exit_status: int | None = None


def bundle(request: LaunchRequest) -> dict[str, float]:
    """What is reserved on each machine."""
    wanted: dict[str, float] = {"CPU": request.cpus}
    if request.gpus:
        wanted["GPU"] = request.gpus
    if request.memory_bytes:
        wanted["memory"] = request.memory_bytes
    return wanted


def strategy_of(request: LaunchRequest) -> str:
    """How Ray is to place the bundles."""
    unknown = sorted(set(request.site) - set(SITE))
    if unknown:
        raise UsageError(f"the Ray engine knows no {unknown[0]!r}", hint=f"it knows {', '.join(SITE)}")
    named = request.site.get("strategy", "STRICT_SPREAD").upper().replace("-", "_")
    if named not in STRATEGIES:
        raise UsageError(f"Ray has no strategy {named!r}", hint=f"one of {', '.join(STRATEGIES)}")
    return named


def why_never_fits(request: LaunchRequest, machines: Sequence[Machine]) -> str | None:
    """Why a request can never have what it asks for on these machines; None if it can, now or later."""
    there = [one for one in machines if one.state != "away" and one.name not in request.avoid]
    copies = [_copies(request, one) for one in there]
    match strategy_of(request):
        case "STRICT_SPREAD":
            room = sum(map(bool, copies))
        case "STRICT_PACK":
            room = max(copies, default=0)
        case _:
            room = sum(copies)
    if room >= request.machines:
        return None
    where = {"STRICT_SPREAD": "", "STRICT_PACK": " on one machine"}.get(strategy_of(request), " side by side")
    apart = f" (without {', '.join(request.avoid)})" if request.avoid else ""
    held = f"of its {len(there)} machines{apart} there is room for {room}"
    return f"{_asked(request)}{where} were asked for, and {held}; the largest has {_largest(there)}"


def _copies(request: LaunchRequest, machine: Machine) -> int:
    """How many of the processes a machine could hold if it were free."""
    counts = [machine.cpus // request.cpus]
    if request.gpus:
        counts.append(machine.gpus // request.gpus)
    if request.memory_bytes:
        counts.append(machine.memory_bytes // request.memory_bytes)
    return min(counts)


def _asked(request: LaunchRequest) -> str:
    parts = [_count(request.gpus, "GPU")] if request.gpus else []
    parts.append(_count(request.cpus, "core"))
    if request.memory_bytes:
        parts.append(f"{request.memory_bytes / 2**30:.3g} GiB")
    return f"{_count(request.machines, 'machine')} with {' and '.join(parts)} each"


def _largest(machines: Sequence[Machine]) -> str:
    if not machines:
        return "nothing"
    most = max(machines, key=lambda one: (one.gpus, one.cpus, one.memory_bytes))
    return f"{_count(most.gpus, 'GPU')}, {_count(most.cpus, 'core')} and {most.memory_bytes / 2**30:.3g} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def machines_of(nodes: Sequence[dict[str, Any]], free: dict[str, dict[str, float]]) -> dict[str, Machine]:
    """Ray's nodes as machines, by Ray's ids. Not those that left, which it knows for ever, nor a head without cores."""
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    names = {node["NodeID"]: _name(node) for node in alive}
    often = Counter(names.values())
    found = {}
    for node in alive:
        number, total = node["NodeID"], node["Resources"]
        left = free.get(number, total)
        gpus, cpus = int(total.get("GPU", 0)), int(total.get("CPU", 0))
        busy = left.get("GPU", 0) < gpus or left.get("CPU", 0) < cpus
        found[number] = Machine(
            name=names[number] if often[names[number]] == 1 else f"{names[number]}-{number[:6]}",
            state="busy" if busy else "free",
            gpus=gpus,
            gpus_free=int(left.get("GPU", 0)),
            cpus=cpus,
            memory_bytes=int(total.get("memory", 0)),
        )
    return found


def _name(node: dict[str, Any]) -> str:
    """What somebody named it, or else its host's name."""
    named = str(node.get("NodeName") or "")
    return named if named and named != node["NodeManagerAddress"] else str(node["NodeManagerHostname"])


def next_state(
    ends: Sequence[TaskExit],
    names: Sequence[str],
    *,
    cancelled: bool,
    limit_s: float | None,
    told_after_s: float | None = None,
) -> NextState:
    """What becomes of a job whose processes are all gone; `limit_s` where they were ended by it, `told_after_s` is when
    they first heard SIGUSR1, from their start on."""
    lost = next((end for end in ends if end.lost), None)
    error = next((end.error for end in ends if end.error), None)
    said = end_of(end.said for end in ends if end.said is not None)
    if said == 0 or (said == REQUEUE and not cancelled):
        without = lost_one(ends, names)
        again = "it has saved, and waits to be started again" if said else ""
        return NextState("waiting" if said else "finished", "; ".join(filter(None, (without, again))), said)
    if cancelled and (lost or error):
        return NextState("cancelled", "somebody cancelled it")
    if error is not None:
        return NextState("failed", error)
    if lost is not None:
        return NextState("waiting", f"{lost_one(ends, names)}; it is started again")
    worst = max(ends, key=lambda end: end.exit_status or 0)
    status = worst.exit_status or 0
    state = state_after_exit(status, cancelled, told_after_s)
    reason = {
        "finished": "",
        "cancelled": "somebody cancelled it",
        "waiting": "it has saved, and waits to be started again",
    }.get(state, f"its command exited with {status} on {_called(names, worst.machine)}")
    if state == "failed" and limit_s is not None:
        reason = f"it was ended at its limit of {limit_s:g} s"
    return NextState(state, reason, status)


def lost_one(ends: Sequence[TaskExit], names: Sequence[str]) -> str:
    """Which machine was lost, in a sentence; nothing where none was."""
    return next((f"{_called(names, end.machine)} was lost ({end.lost})" for end in ends if end.lost), "")


def _called(names: Sequence[str], machine: int) -> str:
    return names[machine] if machine < len(names) and names[machine] else f"its machine {machine}"


def pause_s(short_starts: int) -> float:
    """How long to wait before another start when so many in a row were short: nobody starts for ever at full speed."""
    return 0.0 if short_starts < 3 else min(LONGEST_PAUSE_S, 2.0 ** (short_starts - 3))
