"""What stands out in a run, each with its evidence: `find_insights(records, plan, previous)`, pure.

loss spike      a loss far above those before it, after which the usual level returns
divergence      a loss that has risen and stays high
below plan      steps that take longer than planned
below previous  fewer tokens per second than the previous run of the same recipe
straggler       a worker that the others wait for
unused memory   a plan that leaves half of the device's memory free
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from headway.errors import plural
from headway.track.divergence import find_divergence
from headway.track.events import Event, Record
from headway.track.metrics import history
from headway.track.plans import RunPlan

WINDOW, FEWEST = 32, 8
"""Losses that the spread is that of, and the last few, whose median is the usual level; there must be so many."""
SPREADS, LEAST = 8.0, 0.1
"""A spike is so many spreads and so large a share of the level above it. Of 100,000 normal losses, none is."""
LISTED = 3
"""Spikes that are reported one by one, the largest ones."""
SLOWER = 0.1
"""Share by which a speed must be lower to be reported: runs alike differ by less."""
UNUSED = 0.5

InsightKind: TypeAlias = Literal[
    "loss spike", "divergence", "below plan", "below previous", "straggler", "unused memory"
]


@dataclass(frozen=True)
class Insight:
    """Something that stands out."""

    kind: InsightKind
    text: str
    """It in one sentence, with numbers."""
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


class PreviousRun(NamedTuple):
    """An earlier run of the same recipe on as many workers."""

    name: str
    tokens_per_s: float


class _Spike(NamedTuple):
    step: int
    loss: float
    usual: float
    samples: tuple[int, int] | None


def find_insights(
    records: Sequence[Record], plan: RunPlan | None = None, previous: PreviousRun | None = None
) -> list[Insight]:
    """Return what stands out in a run's records, the most urgent first."""
    steps = history(records)
    divergence = find_divergence((event["step"], _number(event.get("loss"))) for event in steps)
    insights = [] if divergence is None else [Insight("divergence", divergence.text, divergence.step, vars(divergence))]
    insights += _spikes(steps)
    insights += _below_plan(steps, plan)
    insights += _below_previous(steps, previous)
    insights += _stragglers(records)
    return insights + _unused_memory(plan)


def _spikes(steps: Sequence[Event]) -> list[Insight]:
    spikes = sorted(_find_spikes(steps), key=lambda spike: spike.usual - spike.loss)
    insights = []
    for spike in spikes[:LISTED]:
        text = f"loss spike at step {spike.step:,}: {spike.loss:.4g}, about {spike.usual:.4g} before and after"
        evidence: dict[str, Any] = {"loss": spike.loss, "usual": spike.usual}
        if spike.samples is not None:
            first, last = spike.samples
            text += f"; its batch is samples {first:,} to {last:,} of the data order"
            evidence["samples"] = [first, last]
        insights.append(Insight("loss spike", text, spike.step, evidence))
    if len(spikes) > LISTED:
        more = [spike.step for spike in spikes[LISTED:]]
        text = f"{plural(len(more), 'smaller loss spike')} at steps {min(more):,} to {max(more):,}"
        insights.append(Insight("loss spike", text, None, {"steps": sorted(more)}))
    return insights


def _find_spikes(steps: Iterable[Event]) -> Iterable[_Spike]:
    """Yield single losses far above the level; higher ones in a row are a rise, which `divergence` reports."""
    recent: deque[float] = deque(maxlen=WINDOW)
    pending: list[_Spike] = []
    cursor: int | None = None
    for event in steps:
        loss, before = _number(event.get("loss")), cursor
        cursor = event["cursor"] if type(event.get("cursor")) is int else None
        if loss is None:
            continue
        usual, spread = _level(list(recent)) if len(recent) >= FEWEST else (math.inf, 0.0)
        if loss > usual + max(SPREADS * spread, LEAST * abs(usual)):
            samples = None if before is None or cursor is None or cursor <= before else (before, cursor - 1)
            pending.append(_Spike(event["step"], loss, usual, samples))
            if len(pending) > FEWEST:  # it stays there: the new level
                recent.extend(spike.loss for spike in pending)
                pending.clear()
        else:
            yield from pending
            pending.clear()
            recent.append(loss)


def _level(recent: Sequence[float]) -> tuple[float, float]:
    """Return the usual loss, and the spread around it: of differences between neighbours, as losses fall."""
    steps = [abs(b - a) for a, b in pairwise(recent)]
    return statistics.median(recent[-FEWEST:]), 1.4826 * statistics.median(steps) / math.sqrt(2)


def _below_plan(steps: Sequence[Event], plan: RunPlan | None) -> list[Insight]:
    if plan is None or plan.assumed:
        return []
    took = _step_seconds(event for event in steps if event["step"] > plan.from_step)
    if not took or not took > plan.step_s * (1 + SLOWER):
        return []
    text = f"steps take {took:.3g} s, {took / plan.step_s - 1:.0%} longer than the {plan.step_s:.3g} s of the plan"
    return [Insight("below plan", text, None, {"step_s": took, "planned_s": plan.step_s})]


def _below_previous(steps: Sequence[Event], previous: PreviousRun | None) -> list[Insight]:
    took, tokens = _step_seconds(steps), [_number(event.get("tokens")) for event in steps]
    known = [number for number in tokens if number is not None]
    if previous is None or not took or not known or previous.tokens_per_s <= 0:
        return []
    speed = statistics.median(known) / took
    if speed >= previous.tokens_per_s * (1 - SLOWER):
        return []
    share = 1 - speed / previous.tokens_per_s
    before = f"{previous.name} of the same recipe ({previous.tokens_per_s:,.0f})"
    text = f"{speed:,.0f} tokens/s, {share:.0%} less than {before}"
    evidence = {"tokens_per_s": speed, "run": previous.name, "its_tokens_per_s": previous.tokens_per_s}
    return [Insight("below previous", text, None, evidence)]


def _step_seconds(steps: Iterable[Event]) -> float | None:
    """Return the median time of a step; the first steps of an attempt are slower."""
    pairs = [(_number(event.get("data")), _number(event.get("compute"))) for event in steps]
    times = [data + compute for data, compute in pairs if data is not None and compute is not None]
    return statistics.median(times) / 1e9 if times else None


def _stragglers(records: Sequence[Record]) -> list[Insight]:
    """Return one insight per worker that was reported as slow."""
    by_rank: dict[int, list[Event]] = {}
    for record in records:
        for event in record.events:
            if event["kind"] == "straggler" and type(rank := event.get("rank")) is int:
                by_rank.setdefault(rank, []).append(event)
    insights = []
    for rank, events in sorted(by_rank.items()):
        shares = [share for event in events if (share := _number(event.get("share"))) is not None]
        wait = f"; the others wait {max(shares):.0%} of a step" if shares else ""
        times = "" if len(events) == 1 else f" {plural(len(events), 'time')}"
        text = f"worker {rank} was last step after step{times} ({events[-1].get('what', 'unknown part')}){wait}"
        insights.append(Insight("straggler", text, None, {"rank": rank, "shares": shares}))
    return insights


def _unused_memory(plan: RunPlan | None) -> list[Insight]:
    if plan is None or plan.assumed or plan.capacity_bytes <= 0:
        return []
    used = sum(plan.memory_bytes.values())
    if used > (1 - UNUSED) * plan.capacity_bytes:
        return []
    text = (
        f"the plan uses {used / 2**30:.3g} of {plan.capacity_bytes / 2**30:.3g} GB of memory; "
        "a larger microbatch or less recomputation may be faster"
    )
    return [Insight("unused memory", text, None, {"bytes": used, "capacity_bytes": plan.capacity_bytes})]


def _number(value: Any) -> float | None:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if finite else None
