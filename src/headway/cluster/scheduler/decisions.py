"""Decisions of the scheduler, each with a reason: a code and its numbers, formatted as a sentence on demand."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from headway.cluster.scheduler.placement import Placement


class ReasonCode(StrEnum):
    """Why something was decided: the code that is recorded, and a sentence for people."""

    sentence: str

    def __new__(cls, code: str, sentence: str = "") -> Self:
        """`sentence` is formatted with the numbers of a reason."""
        member = str.__new__(cls, code)
        member._value_, member.sentence = code, sentence
        return member

    FIRST = "first", "{gpus} GPUs are free, and no higher-ranked job waits for them"
    BACKFILL = "backfill", "ends by its limit of {limit_s:.0f} s before {head} can start, {gap_s:.0f} s from now"
    PAST = "past", "fits beside the GPUs reserved for {head}"
    RESERVED = "reserved", "{gpus} GPUs are free {wait_s:.0f} s from now, if jobs end by their limits"
    NO_ROOM = "no-room", "needs {gpus} GPUs; the largest gang that fits is {largest}"
    NO_CPUS = "no-cpus", "no node with enough free GPUs has {cpus:g} CPUs and {gib:.3g} GiB of memory free"
    AVOIDS = "avoids", "needs {gpus} GPUs on nodes other than {nodes}, which it must avoid"
    QUOTA = "quota", "needs {gpus} GPUs; tenant {tenant} may take {room} more"
    BAND = "band", "non-preemptible limit ({held} in use + {gpus} requested > {most:.0f} allowed)"
    BEHIND = "behind", "waits behind {head}, which ranks higher"
    DISPLACES = "displaces", "starts by preempting {count} jobs, which lose {lost_gpu_s:.0f} GPU-seconds of work"
    YIELDS = "yields", "preempted for {head}; cheapest victim, loses {lost_gpu_s:.0f} GPU-seconds"
    BUDGET = (
        "budget",
        "tenant {tenant} has spent this month's {budget_gpu_h:.0f} GPU-hours; job is not preemptible",
    )
    LIMIT_BUDGET = (
        "limit-budget",
        "not preemptible, may use {needs_gpu_h:.0f} GPU-hours by its limit; tenant {tenant} has {left_gpu_h:.0f} left",
    )
    BLOCKS = (
        "blocks",
        "not preemptible, would borrow; a job of higher priority waits for its tenant's guarantee",
    )
    DRAINS = "drains", "has waited {wait_s:.0f} s; {nodes} nodes are reserved, {held} GPUs there cannot be preempted"
    KEPT = "kept", "not preemptible, and its limit ends too late for the nodes reserved for {head}"
    COMPACTS = "compacts", "moves to other free GPUs, without loss of work, so that {head} fits"
    COMPACTED = "compacted", "starts on nodes that {count} jobs leave for other free GPUs"
    AWAY = "away", "maintenance of node {node} begins in {in_s:.0f} s; saves and restarts elsewhere"
    WINDOW = "window", "{gpus} GPUs are free only on nodes with maintenance before its time limit ends"
    GROWS = "grows", "grows from {before} to {gpus} GPUs, which adds the work of {adds:.1f} GPUs"
    SHRINKS = "shrinks", "shrinks to {gpus} GPUs so that {head} can start"
    RUNS = "runs", "has held {gpus} GPUs since {since_s:.0f} s"


WITHOUT_GPUS = "its CPUs and memory are free, and no higher-ranked job waits for them"
"""The sentence of "first" for a job without GPUs."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A code and its numbers."""

    code: ReasonCode
    numbers: tuple[tuple[str, float | int | str], ...] = ()

    @property
    def sentence(self) -> str:
        """The reason for people."""
        numbers = dict(self.numbers)
        template = WITHOUT_GPUS if self.code is ReasonCode.FIRST and not numbers["gpus"] else self.code.sentence
        return _ONE.sub(_singular, template.format(**numbers))


_ONE = re.compile(r"(?<![\d.,])1 (GPU|job|node)s\b(?:(,? which|)( are| leave| lose))?")
_VERBS = {" are": " is", " leave": " leaves", " lose": " loses"}


def _singular(match: re.Match[str]) -> str:
    """Return `1 GPU is` for `1 GPUs are`."""
    return f"1 {match[1]}{match[2] or ''}{_VERBS.get(match[3], '')}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with one job."""

    kind: Literal["start", "stop", "move", "resize", "reserve"]
    job: int
    """Row of the job in the snapshot."""
    pool: int
    placement: Placement
    reason: Reason
    at_s: float = 0.0
    """Earliest start of a reservation."""
