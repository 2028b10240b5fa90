"""What Slurm's commands print, in our words: pure functions of text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from headway.cluster.engines.engine import JobStatus, LaunchRequest, Machine, State, state_after_exit
from headway.errors import EngineError, UsageError

__all__ = [
    "ACCOUNTS",
    "COMMENTS",
    "NODES",
    "PARTITIONS",
    "QUEUE",
    "CommentState",
    "Partition",
    "ScriptState",
    "SlurmJobRow",
    "check_room",
    "job_status",
    "meant",
    "parse_accounts",
    "parse_comments",
    "parse_nodes",
    "parse_partitions",
    "parse_queue",
]

QUEUE = "%i|%T|%r|%S"
"""squeue: the job, its state, why it waits, and when it starts, or may."""
COMMENTS = "JobArrayID:|,Comment:|"
"""squeue: the job, and what its script says of it."""
HOLD_S = 120.0
"""How long Slurm holds a job back that it has put into the queue again."""
ACCOUNTS = "JobID,State,ExitCode,NodeList"
NODES = "NodeList:|,StateLong:|,CPUs:|,Memory:|,Gres:|,GresUsed:|,Partition:|,Reason:|"
PARTITIONS = "%P|%l"
"""sinfo: the partition, and the longest that a job may take there."""
MIB = 2**20

_STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "RESV_DEL_HOLD": "waiting",
    "CONFIGURING": "waiting",
    "RUNNING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "COMPLETING": "ending",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",
    "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
}
_NEVER = re.compile(
    "BadConstraints|PartitionNodeLimit|PartitionTimeLimit|InvalidAccount|InvalidQOS|.*PerJobLimit|.*PerJob|"
    "(Assoc|QOS)Max(WallDuration|CPU|Gres|GRES|Memory|Node|Nodes|Cpu).*"
)
"""Reasons of Slurm's that no waiting helps against, as long as nobody changes the limits."""
_ENDS = {
    "TIMEOUT": "it was ended at its time limit",
    "NODE_FAIL": "a machine of it failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "another job took its machines",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "a machine of it did not start",
}
_WAITS = {
    "None": "",
    "Resources": "it waits for machines",
    "Priority": "others come first",
    "BeginTime": "Slurm holds it back for two minutes after a start that failed or was given back",
    "Dependency": "it waits for the start before it to end",
}


@dataclass(frozen=True)
class SlurmJobRow:
    """What Slurm says of a job."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    begin: float | None = None
    """When it starts, or may, in Unix seconds, where Slurm says so."""

    def held_since(self) -> float | None:
        """When it was put back into the queue, if that is why it waits."""
        return self.begin - HOLD_S if self.begin is not None and self.reason == "BeginTime" else None


@dataclass(frozen=True)
class ScriptState:
    """What a job's script has left in its folder."""

    starts: int = 0
    machines: tuple[str, ...] = ()
    ended: int | None = None
    """The exit status of the last start, if that has ended by itself."""
    cancelled: bool = False
    lost: str = ""
    """Machines that were lost in the last start, with commas, as far as srun was there to hear of it."""
    orphaned: bool = False
    """Whether the machine was lost that the script ran on, and `ended` is what the commands have said of the whole."""


def parse_queue(text: str) -> dict[str, SlurmJobRow]:
    """squeue's lines, by job."""
    found = {}
    for line in text.splitlines():
        fields = _fields("squeue", line, 4)
        found[fields[0]] = SlurmJobRow(fields[1], fields[2], begin=_time(fields[3]))
    return found


@dataclass(frozen=True)
class CommentState:
    """What the script of a job says in its comment, where it shares no folder with who submitted it."""

    number: str
    """Slurm's own for the job, the newest where it was submitted again."""
    starts: int = 0
    machines: str = ""
    """With commas."""
    ended: int | None = None
    lost: str = ""


def parse_comments(text: str) -> dict[tuple[str, str], CommentState]:
    """squeue's lines, by a comment's first word and the number of an array's copy; the newest job of each."""
    found = dict[tuple[str, str], CommentState]()
    for line in text.splitlines():
        number, _, comment = line.strip().removesuffix("|").partition("|")
        words = comment.split()
        base, _, index = number.partition("_")
        if not words or not base.isdecimal():
            continue
        told = dict(word.partition("=")[::2] for word in words[1:])
        starts, ended = told.get("starts", ""), told.get("ended", "")
        one = CommentState(
            number,
            int(starts) if starts.isdecimal() else 0,
            told.get("on", ""),
            int(ended) if ended.isdecimal() else None,
            told.get("lost", ""),
        )
        known = found.get((words[0], index))
        if known is None or int(known.number.partition("_")[0]) <= int(base):
            found[words[0], index] = one
    return found


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # as Slurm and this machine tell the time
    except ValueError:
        return None


def parse_accounts(text: str) -> dict[str, SlurmJobRow]:
    """sacct's lines, by job; "CANCELLED by 1000" is CANCELLED."""
    found = {}
    for line in text.splitlines():
        job, state, code, _ = _fields("sacct", line, 4)
        status, _, number = code.partition(":")
        exit_status = 128 + int(number) if number.isdecimal() and int(number) else int(status or 0)
        found[job] = SlurmJobRow(state.split()[0] if state else "", state, exit_status)
    return found


def parse_nodes(text: str) -> list[Machine]:
    """sinfo's lines, one a node and partition, as machines."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = _fields("sinfo", line.removesuffix("|"), 8)
        rows.setdefault(fields[0], []).append(fields)
    return [_machine(name, of_one) for name, of_one in rows.items()]


def _machine(name: str, rows: list[list[str]]) -> Machine:
    _, state, cpus, memory, gres, used, _, reason = rows[0]
    plain = re.sub(r"[^a-z]+$", "", state)
    kinds: dict[str, str] = {
        "idle": "free",
        "planned": "free",
        "mixed": "busy",
        "allocated": "busy",
        "completing": "busy",
    }
    kind = kinds.get(plain, "away") if state.rstrip("-+") == plain else "away"
    gpus = _gpus(gres)
    return Machine(
        name=name,
        state=kind,  # type: ignore[arg-type]
        gpus=gpus,
        gpus_free=max(0, gpus - _gpus(used)) if kind != "away" else 0,
        cpus=int(cpus),
        memory_bytes=int(memory) * MIB,
        groups=tuple(sorted(row[6].rstrip("*") for row in rows)),
        reason="" if kind != "away" else f"{state}: {reason}" if reason not in ("", "none") else state,
    )


def _gpus(gres: str) -> int:
    """Of `gpu:4`, `gpu:h100:8(S:0-1)`, `gpu:(null):2(IDX:0-1),gpu:h100:1`."""
    return sum(int(number) for number in re.findall(r"gpu:(?:[^:,]*:)?(\d+)", gres))


@dataclass(frozen=True)
class Partition:
    """What a partition allows."""

    name: str
    minutes: int | None
    """The longest that a job may take; None is no limit."""
    default: bool = False


def parse_partitions(text: str) -> dict[str, Partition]:
    """sinfo's lines, by partition."""
    rows = [_fields("sinfo", line, 2) for line in text.splitlines()]
    found = [Partition(word.rstrip("*"), _minutes(limit), word.endswith("*")) for word, limit in rows]
    return {one.name: one for one in found}


def meant(partitions: Mapping[str, Partition], wanted: str | None) -> list[Partition]:
    """Those that a job may run in: as it says, else the default one. What sinfo does not show is left to sbatch."""
    if not wanted:
        return [one for one in partitions.values() if one.default]
    return [partitions[name] for name in wanted.split(",") if name in partitions]


def check_room(request: LaunchRequest, machines: Sequence[Machine], partitions: Sequence[Partition]) -> None:
    """UsageError where no partition has what a job asks for, were it all free. Slurm would have it wait for ever."""
    if not partitions:
        return
    wants = {"cpus": request.cpus, "gpus": request.gpus, "memory_bytes": request.memory_bytes or 0}
    names = {one.name for one in partitions}
    there = [machine for machine in machines if names & set(machine.groups)]
    fit = [one for one in there if all(getattr(one, key) >= amount for key, amount in wants.items())]
    if max((sum(name in one.groups for one in fit) for name in names), default=0) >= request.machines:
        return
    words = {"cpus": "CPUs", "gpus": "GPUs", "memory_bytes": "bytes of memory"}
    asked = ", ".join(f"{amount} {words[key]}" for key, amount in wants.items() if amount)
    most = ", ".join(
        f"{max((getattr(one, key) for one in there), default=0)} {words[key]}" for key in wants if wants[key]
    )
    where = f"partition {' or '.join(sorted(names))}"
    raise UsageError(
        f"job {request.name} asks for {request.machines} machines with {asked} each; {where} "
        f"has {len(there)}, of which {len(fit)} have that (the most: {most})",
        hint="ask for less; headway nodes --engine slurm shows what there is",
    )


def _minutes(text: str) -> int | None:
    """Of days-hours:minutes:seconds, from the right."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, _ = [0, 0, 0, *parts][-3:]
    return (int(days or 0) * 24 + hours) * 60 + minutes


def job_status(row: SlurmJobRow | None, own: ScriptState) -> JobStatus:
    """How a job stands: as Slurm says while it is alive; once it is over, as its own script left it written."""
    told = _standing(row, own)
    return replace(told, reason="; ".join(filter(None, (_cut_off(told, own), told.reason)))) if own.starts else told


def _cut_off(told: JobStatus, own: ScriptState) -> str:
    """What happened to the last start, where something did that its command could not help."""
    if own.lost or own.orphaned:
        return f"{own.lost or own.machines[0]} was lost"
    cut = told.native == "PENDING" and told.state == "waiting" and own.ended is None
    return "its last start was cut off, as when a machine is lost" if cut else ""


def _standing(row: SlurmJobRow | None, own: ScriptState) -> JobStatus:
    said = _STATES.get(row.state, "unknown") if row is not None else "unknown"
    native = row.state if row is not None else ""
    if row is not None and said == "waiting":
        if own.cancelled:
            return JobStatus("ending", "somebody cancelled it", own.machines, own.ended, own.starts, native)
        if _NEVER.fullmatch(row.reason):
            return JobStatus("impossible", f"Slurm says {row.reason}", (), None, own.starts, native)
        reason = _WAITS.get(row.reason, f"Slurm says {row.reason}")
        return JobStatus("waiting", reason, own.machines, None, own.starts, native)
    if said in ("running", "ending"):
        again = own.ended is not None and state_after_exit(own.ended, own.cancelled) == "waiting"
        state: State = "waiting" if again else "ending" if own.cancelled else said
        reason = "it has saved, and waits to be started again" if again else ""
        return JobStatus(state, reason, own.machines, own.ended, own.starts, native)
    return _over(said, row, own, native)


def _over(said: State, row: SlurmJobRow | None, own: ScriptState, native: str) -> JobStatus:
    """A job that Slurm has done with, or does not know (any more)."""
    if own.ended is not None and (said != "cancelled" or own.orphaned):
        state = state_after_exit(own.ended, own.cancelled)
        if state == "waiting":  # it wanted to be started again, and Slurm did not
            state, reason = "failed", "it has saved, and could not be put back into the queue"
        else:
            reason = {"failed": f"its command exited with {own.ended}", "cancelled": "somebody cancelled it"}.get(
                state, ""
            )
        return JobStatus(state, reason, own.machines, own.ended, own.starts, native)
    if own.cancelled or said == "cancelled":
        return JobStatus("cancelled", "somebody cancelled it", own.machines, own.ended, own.starts, native)
    if row is None:
        if own.starts:
            return JobStatus(
                "failed", "it ended without a word, and Slurm has forgotten it", own.machines, None, own.starts
            )
        return JobStatus("unknown", "Slurm does not know it, or no longer")
    if said == "unknown":
        return JobStatus("unknown", f"Slurm calls it {row.state}", own.machines, None, own.starts, native)
    reason = _ENDS.get(row.state, f"Slurm says {row.reason or row.state}")
    state = "failed" if said == "finished" and own.starts else said
    return JobStatus(state, reason, own.machines, row.exit_status, own.starts, native)


def _fields(command: str, line: str, count: int) -> list[str]:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != count:
        raise EngineError(
            f'{command} said "{line}", where {count} fields were expected',
            hint="Slurm from 22.05 on is known; tell us which version this is",
        )
    return fields
