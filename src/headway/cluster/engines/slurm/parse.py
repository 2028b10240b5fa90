"""Parse the output of Slurm's commands into Headway's types: pure functions of text."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from headway.cluster.engines.engine import (
    CANCELLED,
    JobStatus,
    LaunchRequest,
    Machine,
    State,
    exit_reason,
    state_after_exit,
)
from headway.errors import EngineError, UsageError, plural

QUEUE = "%i|%T|%r|%S"
"""squeue: job, state, reason for waiting, (expected) start time."""
COMMENTS = "JobArrayID:|,Comment:|"
"""squeue: job, and the state that its script reports in the comment."""
HOLD_S = 120.0
"""How long Slurm holds a requeued job."""
ACCOUNTS = "JobID,State,ExitCode,NodeList"
NODES = "NodeList:|,StateLong:|,CPUs:|,Memory:|,Gres:|,GresUsed:|,Partition:|,Reason:|"
PARTITIONS = "%P|%l"
"""sinfo: partition and time limit."""
MIB = 2**20

_NATIVE_STATES: Mapping[State, str] = {
    "waiting": "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD CONFIGURING",
    "running": "RUNNING SUSPENDED STOPPED RESIZING SIGNALING STAGE_OUT",
    "ending": "COMPLETING",
    "finished": "COMPLETED",
    "cancelled": "CANCELLED REVOKED",
    "failed": "FAILED TIMEOUT NODE_FAIL BOOT_FAIL DEADLINE OUT_OF_MEMORY PREEMPTED LAUNCH_FAILED RECONFIG_FAIL",
}
_STATES = {native: state for state, names in _NATIVE_STATES.items() for native in names.split()}
_NEVER = re.compile(
    "BadConstraints|PartitionNodeLimit|PartitionTimeLimit|InvalidAccount|InvalidQOS|.*PerJobLimit|.*PerJob|"
    "(Assoc|QOS)Max(WallDuration|CPU|Gres|GRES|Memory|Node|Nodes|Cpu).*"
)
"""Slurm's reasons of jobs that can never start under the present limits."""
_ENDS = {
    "TIMEOUT": "killed at its time limit",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted by another job",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "a node failed to boot",
}
_WAITS = {
    "None": "",
    "Resources": "waiting for nodes",
    "Priority": "jobs of higher priority come first",
    "BeginTime": "held by Slurm after a failed or requeued start",
    "Dependency": "waiting for the previous start to end",
}


@dataclass(frozen=True)
class SlurmJobRow:
    """A job as squeue or sacct reports it."""

    state: str
    reason: str = ""
    exit_status: int | None = None
    begin: float | None = None
    """(Expected) start time in Unix seconds, if Slurm gives one."""

    def held_since(self) -> float | None:
        """When it was requeued, if that is why it waits."""
        return self.begin - HOLD_S if self.begin is not None and self.reason == "BeginTime" else None


def release_in(begin: float, now: float, cleared_s: float) -> int | None:
    """Return how many seconds from now a job held until `begin` may start; None if its hold was lifted before.

    Slurm's own hold ends HOLD_S after the requeue, and the job may start `cleared_s` after it. Lifting the hold moves
    `begin` to at most `cleared_s` from now, plus two seconds of rounding: then the time of the requeue is no longer
    known, and the job starts soon anyway.
    """
    if begin <= now + cleared_s + 2:
        return None
    return max(0, math.ceil(begin - HOLD_S + cleared_s - now))


@dataclass(frozen=True)
class ScriptState:
    """The state that a job's script has recorded in its folder."""

    starts: int = 0
    machines: tuple[str, ...] = ()
    ended: int | None = None
    """Exit status of the last start, if the script lived to record it."""
    cancelled: bool = False
    lost: str = ""
    """Machines lost in the last start, comma-separated, as far as srun noticed."""
    orphaned: bool = False
    """Whether the machine of the script was lost, and `ended` is what the commands reported for the whole job."""
    overdue: bool = False
    """Whether it was cancelled so long ago that its script should have ended it."""


def parse_queue(text: str) -> dict[str, SlurmJobRow]:
    """squeue's lines, by job."""
    rows = [_fields("squeue", line, 4) for line in text.splitlines()]
    return {job: SlurmJobRow(state, reason, begin=_time(begin)) for job, state, reason, begin in rows}


@dataclass(frozen=True)
class CommentState:
    """The state that a job's script reports in its comment, where no folder is shared."""

    number: str
    """Slurm's job id; the newest if it was submitted again."""
    starts: int = 0
    machines: str = ""
    """Comma-separated."""
    ended: int | None = None
    lost: str = ""


def parse_comments(text: str) -> dict[tuple[str, str], CommentState]:
    """squeue's lines, by the first word of the comment and the array index; the newest job of each."""
    states = dict[tuple[str, str], CommentState]()
    for line in text.splitlines():
        number, _, comment = line.strip().removesuffix("|").partition("|")
        words = comment.split()
        base, _, index = number.partition("_")
        if not words or not base.isdecimal():
            continue
        values = dict(word.partition("=")[::2] for word in words[1:])
        starts, ended = values.get("starts", ""), values.get("ended", "")
        known = states.get((words[0], index))
        if known is None or int(known.number.partition("_")[0]) <= int(base):
            states[words[0], index] = CommentState(
                number,
                int(starts) if starts.isdecimal() else 0,
                values.get("on", ""),
                int(ended) if ended.isdecimal() else None,
                values.get("lost", ""),
            )
    return states


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()  # local time, as Slurm prints it
    except ValueError:
        return None


def parse_accounts(text: str) -> dict[str, SlurmJobRow]:
    """sacct's lines, by job; "CANCELLED by 1000" is CANCELLED."""
    rows = {}
    for line in text.splitlines():
        job, state, code, _ = _fields("sacct", line, 4)
        status, _, number = code.partition(":")
        exit_status = 128 + int(number) if number.isdecimal() and int(number) else int(status or 0)
        rows[job] = SlurmJobRow(state.split()[0] if state else "", state, exit_status)
    return rows


def parse_nodes(text: str) -> list[Machine]:
    """sinfo's lines, one per node and partition, as machines."""
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = _fields("sinfo", line.removesuffix("|"), 8)
        rows.setdefault(fields[0], []).append(fields)
    return [_machine(name, node_rows) for name, node_rows in rows.items()]


def _machine(name: str, rows: list[list[str]]) -> Machine:
    _, state, cpus, memory, gres, used, _, reason = rows[0]
    plain = re.sub(r"[^a-z]+$", "", state)
    available = state.rstrip("-+") == plain and plain in ("idle", "planned", "mixed", "allocated", "completing")
    gpus = _gpus(gres)
    return Machine(
        name=name,
        state="away" if not available else "free" if plain in ("idle", "planned") else "busy",
        gpus=gpus,
        gpus_free=max(0, gpus - _gpus(used)) if available else 0,
        cpus=int(cpus),
        memory_bytes=int(memory) * MIB,
        groups=tuple(sorted(row[6].rstrip("*") for row in rows)),
        reason="" if available else f"{state}: {reason}" if reason not in ("", "none") else state,
    )


def _gpus(gres: str) -> int:
    """The number of GPUs in `gpu:4`, `gpu:h100:8(S:0-1)`, `gpu:(null):2(IDX:0-1),gpu:h100:1`."""
    return sum(int(number) for number in re.findall(r"gpu:(?:[^:,]*:)?(\d+)", gres))


@dataclass(frozen=True)
class Partition:
    """The limits of a partition."""

    name: str
    minutes: int | None
    """Time limit of a job; None is no limit."""
    default: bool = False


def parse_partitions(text: str) -> dict[str, Partition]:
    """sinfo's lines, by partition."""
    rows = [_fields("sinfo", line, 2) for line in text.splitlines()]
    partitions = [Partition(name.rstrip("*"), _minutes(limit), name.endswith("*")) for name, limit in rows]
    return {partition.name: partition for partition in partitions}


def select_partitions(partitions: Mapping[str, Partition], names: str | None) -> list[Partition]:
    """The named partitions, or the default one. Those that sinfo does not show are left for sbatch to judge."""
    if not names:
        return [partition for partition in partitions.values() if partition.default]
    return [partitions[name] for name in names.split(",") if name in partitions]


def check_room(request: LaunchRequest, machines: Sequence[Machine], partitions: Sequence[Partition]) -> None:
    """Raise UsageError if no partition could hold a job even if it were idle. Slurm would let it wait for ever."""
    if not partitions:
        return
    amounts = {"cpus": request.cpus, "gpus": request.gpus, "memory_bytes": request.memory_bytes or 0}
    names = {partition.name for partition in partitions}
    candidates = [machine for machine in machines if names & set(machine.groups)]
    fitting = [
        machine for machine in candidates if all(getattr(machine, key) >= amount for key, amount in amounts.items())
    ]
    if max((sum(name in machine.groups for machine in fitting) for name in names), default=0) >= request.machines:
        return
    asked = ", ".join(_amount(key, amount) for key, amount in amounts.items() if amount)
    most = ", ".join(
        _amount(key, max((getattr(machine, key) for machine in candidates), default=0))
        for key, amount in amounts.items()
        if amount
    )
    raise UsageError(
        f"job {request.name} asks for {plural(request.machines, 'machine')} with {asked} each; partition "
        f"{' or '.join(sorted(names))} has {len(candidates)}, of which {len(fitting)} fit (the most: {most})",
        hint="ask for less; headway nodes --engine slurm shows what there is",
    )


def _amount(key: str, number: int) -> str:
    return f"{number / 2**30:.3g} GiB" if key == "memory_bytes" else plural(number, {"cpus": "CPU", "gpus": "GPU"}[key])


def _minutes(text: str) -> int | None:
    """Minutes of [days-][[hours:]minutes:]seconds."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, _ = [0, 0, 0, *parts][-3:]
    return (int(days or 0) * 24 + hours) * 60 + minutes


def job_status(row: SlurmJobRow | None, script: ScriptState, *, is_released: bool = False) -> JobStatus:
    """The state of a job: from Slurm while it is live; once it is over, from what its script recorded.

    `is_released`: its hold was lifted before, or ends as soon as a release would have it end.
    """
    status = _status(row, script)
    status = replace(status, remedy=_remedy(row, status, script)) if row is not None else status
    if row is not None and row.held_since() is not None and status.remedy and is_released:
        begin = time.strftime("%H:%M:%S", time.localtime(row.begin))
        status = replace(status, reason=f"starts at {begin} or later", remedy="")
    if not script.starts:
        return status
    return replace(status, reason="; ".join(filter(None, (_interruption(status, script), status.reason))))


def _remedy(row: SlurmJobRow, status: JobStatus, script: ScriptState) -> Literal["", "requeue", "cancel"]:
    """What helps a job along that Slurm holds, whose script was lost, or that does not end although it was
    cancelled."""
    if script.orphaned and row.state == "RUNNING":
        return "requeue" if status.state == "waiting" else "cancel"
    if status.state == "waiting" and row.held_since() is not None:
        return "requeue"
    return "cancel" if script.overdue and row.state == "RUNNING" else ""


def _interruption(status: JobStatus, script: ScriptState) -> str:
    """What cut the last start off, if anything did."""
    if script.lost or script.orphaned:
        return f"{script.lost or script.machines[0]} was lost"
    cut_off = status.native == "PENDING" and status.state == "waiting" and script.ended is None
    return "its last start was cut off, as when a machine is lost" if cut_off else ""


def _status(row: SlurmJobRow | None, script: ScriptState) -> JobStatus:
    state = _STATES.get(row.state, "unknown") if row is not None else "unknown"
    status = JobStatus(state, "", script.machines, script.ended, script.starts, row.state if row is not None else "")
    if row is not None and state == "waiting":
        if script.cancelled:
            return replace(status, state="ending", reason=CANCELLED)
        if _NEVER.fullmatch(row.reason):
            return replace(status, state="impossible", reason=f"Slurm: {row.reason}", machines=(), exit_status=None)
        reason = _WAITS.get(row.reason, f"Slurm: {row.reason}")
        if row.held_since() is not None:
            reason = f"held by Slurm until {time.strftime('%H:%M', time.localtime(row.begin))}"
        return replace(status, reason=reason, exit_status=None)
    if state in ("running", "ending"):
        if script.ended is not None and state_after_exit(script.ended, script.cancelled) == "waiting":
            return replace(status, state="waiting", reason=exit_reason("waiting", script.ended))
        return replace(status, state="ending") if script.cancelled else status
    return _over(status, row, script)


def _over(status: JobStatus, row: SlurmJobRow | None, script: ScriptState) -> JobStatus:
    """The state of a job that is over for Slurm, or that Slurm does not know (any more)."""
    if script.ended is not None and (status.state != "cancelled" or script.orphaned):
        state = state_after_exit(script.ended, script.cancelled)
        if state == "waiting":  # it wanted to be restarted, and Slurm did not
            return replace(status, state="failed", reason="saved, but could not be requeued")
        return replace(status, state=state, reason=exit_reason(state, script.ended))
    if script.cancelled or status.state == "cancelled":
        return replace(status, state="cancelled", reason=CANCELLED)
    if row is None:
        if script.starts:
            return replace(
                status, state="failed", reason="no exit status was recorded, and Slurm has forgotten the job"
            )
        return replace(status, reason="unknown to Slurm, or forgotten", machines=())
    if status.state == "unknown":
        return replace(status, reason=f"unknown Slurm state {row.state}")
    reason = _ENDS.get(row.state, f"Slurm: {row.reason or row.state}")
    failed = status.state == "finished" and script.starts
    return replace(status, state="failed" if failed else status.state, reason=reason, exit_status=row.exit_status)


def _fields(command: str, line: str, count: int) -> list[str]:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != count:
        raise EngineError(
            f'{command} printed "{line}", expected {count} fields',
            hint="Slurm 22.05 and later is supported; report this with your version",
        )
    return fields
