"""Goodput under failures: the optimal checkpoint interval and the useful share of the wall time.

The model is Daly's (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22, 2006).
Failures hit the whole job at a constant rate, one in M seconds, during steps, saves and restarts. The run is cut into
segments of work and a save; a failure discards the work of its segment and is followed by a restart of R seconds, which
may fail as well. A segment of L seconds then takes on average

    M exp(R / M) (exp(L / M) - 1)

which is exact: L itself, M (exp(L / M) - 1) - L of discarded work, and (exp(L / M) - 1) restarts that take
M (exp(R / M) - 1) each, with their own failures. Every run ends with a save.

Headway's saves are written while training continues. The stall per save is short, and Daly's interval with it: what
limits the saves is how fast storage writes them. A failure also discards the work done while its segment's first save
was not yet durable, W seconds on average.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headway.errors import UsageError

LOCAL_DISK_BYTES_S = 1.25e9
"""Write rate of an H200 host's local disk; measured."""
SHARED_BYTES_S_PER_NODE = 0.67e9
"""Write rate of a cluster's shared storage per node: The Llama 3 Herd of Models (2024), section 3.3.1: 2 TB/s sustained
for 24,000 GPUs, 3,000 nodes."""
WRITE_SHARE = 0.1
"""Most of storage's write time that saves may take: the rest is for reading data, for other jobs and for retries."""

DEVICE_TO_HOST_BYTES_S = 55e9
"""From an H200 to pinned host memory; measured (benchmarks/results/state_h200.json)."""
CPU_COPY_BYTES_S = 8e9
"""Memory to memory by one worker; measured."""
_HIDDEN = 0.9  # share of a step that the copy overlaps with: its passes; the optimizer waits for the copy
_LEAST_STALL_S = 0.005

# Relative to an interval: a shorter remainder of the run is rounding.
SAME = 1e-9


Bound = Literal["stall", "write bandwidth", "step", "run", "recipe", "no failure rate"]
"""What decides how often to save: the cost of stalls, the time that storage needs, a step (the shortest interval), the
length of the run, the recipe, or nothing, if failures are unknown."""


@dataclass(frozen=True)
class Goodput:
    """A run with its checkpoints and expected failures. All figures are means."""

    checkpoint_s: float
    """Stall per save."""
    interval_s: float | None
    """Work between saves; None if the run saves only at the end."""
    interval_steps: int | None
    saves: int
    """Successful saves, including the last."""
    failures: float
    """Expected failures, including those during restarts."""
    lost_s_per_failure: float
    """Rework and restart per failure: about the restart and half an interval; 0 without failures."""
    share: float
    """Useful share of the wall time."""
    accounts: Mapping[str, float]
    """Lost shares of the wall time, by ledger account; `share` is the rest."""
    wall_s: float
    """Full run, from its first step to its last save."""
    mtbf_s: float
    """Mean time between failures of the job; infinite if no rate is known."""
    write_s: float
    """Seconds until a save is durable."""
    bound: Bound
    """What decides the interval."""
    reason: str
    """Why this interval."""


@dataclass(frozen=True)
class _Costs:
    """Expected lost seconds of a run."""

    saves: int
    stall_s: float
    rework_s: float
    restart_s: float

    @property
    def lost_s(self) -> float:
        return self.stall_s + self.rework_s + self.restart_s


def goodput(
    run_s: float,
    devices: int,
    gpu_hours_between_failures: float | None,
    save_s: float,
    restart_s: float,
    *,
    step_s: float,
    interval_s: float | None = None,
    write_s: float = 0.0,
) -> Goodput:
    """Goodput of a run whose steps take `run_s` in total, without saves and failures.

    `restart_s` is from a failure to the next step: detect, start, restore. Without `interval_s` the run saves at Daly's
    higher-order optimum, spread evenly over the run, but writes for at most `WRITE_SHARE` of the time. A save is
    durable after `write_s`; one that is due before that is skipped.
    """
    _check(run_s=run_s, devices=devices, save_s=save_s, restart_s=restart_s, step_s=step_s)
    if interval_s is not None:
        _check(interval_s=interval_s)
    mtbf_s = math.inf
    if gpu_hours_between_failures is not None:
        _check(gpu_hours_between_failures=gpu_hours_between_failures)
        mtbf_s = gpu_hours_between_failures * 3600 / devices
    steps = max(1, math.ceil(run_s / step_s * (1 - SAME)))
    every: int | None
    bound: Bound
    if interval_s is not None:
        every = min(steps, max(1, round(interval_s / step_s)))
        bound, why = "recipe", "as given, in full steps"
    elif mtbf_s < math.inf:
        every, bound = _best_steps(run_s, steps, step_s, save_s, restart_s, mtbf_s, write_s)
        why = _reason(bound, save_s, mtbf_s, write_s)
    else:
        every, bound, why = None, "no failure rate", "saves only at the end: no failure rate is known"
    costs = _costs(run_s, every and every * step_s, save_s, restart_s, mtbf_s, write_s)
    wall_s = run_s + costs.lost_s
    if wall_s == math.inf:
        raise UsageError(
            f"a job that fails every {mtbf_s:.3g} s never completes an interval or a restart",
            hint="save more often, restart faster, or use fewer devices",
        )
    failures = wall_s / mtbf_s  # the failure rate is constant over the wall time
    parts = {"checkpoint stall": costs.stall_s, "rework": costs.rework_s, "restart": costs.restart_s}
    return Goodput(
        checkpoint_s=save_s,
        interval_s=every and every * step_s,
        interval_steps=every,
        saves=costs.saves,
        failures=failures,
        lost_s_per_failure=(costs.rework_s + costs.restart_s) / failures if failures else 0.0,
        share=run_s / wall_s,
        accounts=MappingProxyType({name: seconds / wall_s for name, seconds in parts.items()}),
        wall_s=wall_s,
        mtbf_s=mtbf_s,
        write_s=write_s,
        bound=bound,
        reason=why,
    )


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The optimal work between saves of a long run, by Daly's higher-order formula.

    It is within 0.2 % of the exact optimum throughout. Young's sqrt(2 save_s mtbf_s) costs 0.02 % more wall time if a
    save takes a hundredth of the time between failures, 0.5 % for a tenth, 14 % for as much.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def save_interval(
    save_s: float, devices: int, hours_between_failures: float, failures: int = 0, seconds: float = 0.0
) -> float:
    """Seconds of work between saves of a running job: Daly's optimum for its failure rate.

    `hours_between_failures` is the expected rate per device; the job's own rate, `failures` in `seconds`, counts if it
    is higher.
    """
    _check(devices=devices, hours_between_failures=hours_between_failures)
    mtbf_s = hours_between_failures * 3600 / devices
    if failures:
        mtbf_s = min(mtbf_s, max(seconds, 1.0) / failures)
    return daly_interval(max(save_s, 1e-3), mtbf_s)


def stall_seconds(state_bytes_per_device: float, step_s: float, *, gpu: bool) -> float:
    """Stall per save: the copy to host memory, less what overlaps with the passes of the next step."""
    if not gpu:
        return max(_LEAST_STALL_S, state_bytes_per_device / CPU_COPY_BYTES_S)
    return max(_LEAST_STALL_S, state_bytes_per_device / DEVICE_TO_HOST_BYTES_S - _HIDDEN * step_s)


def save_seconds(state_bytes: float, nodes: int, storage_bytes_s: float | None = None) -> float:
    """Seconds until a save of the whole state is durable; replicas do not write twice.

    `storage_bytes_s` is the write rate of all nodes together. By default one node writes to its local disk, and several
    to the storage that they share.
    """
    default = LOCAL_DISK_BYTES_S if nodes == 1 else nodes * SHARED_BYTES_S_PER_NODE
    rate = default if storage_bytes_s is None else storage_bytes_s
    _check(state_bytes=state_bytes, nodes=nodes, storage_bytes_s=rate)
    return state_bytes / rate


def _best_steps(
    run_s: float, steps: int, step_s: float, save_s: float, restart_s: float, mtbf_s: float, write_s: float
) -> tuple[int, Bound]:
    """Steps between saves, and what decides them.

    Equal segments cost least for their number, and the cost is convex in that number: the best is one of the two
    integers around the optimum of an endless run.
    """
    daly_s, least_s = daly_interval(save_s, mtbf_s), write_s / WRITE_SHARE
    optimum_s = max(step_s, least_s, daly_s)
    segments = max(1, math.floor(run_s / optimum_s))
    rounded = min(steps, max(1, round(optimum_s / step_s)))
    choices = {rounded, math.ceil(steps / segments), math.ceil(steps / (segments + 1))}
    fewest = min(steps, math.ceil(least_s / step_s * (1 - SAME)))
    choices = {max(every, fewest) for every in choices}

    def lost_s(every: int) -> float:
        return _costs(run_s, every * step_s, save_s, restart_s, mtbf_s, write_s).lost_s

    best = min(sorted(choices), key=lost_s)
    if best >= steps:
        return best, "run"
    if optimum_s == least_s:
        return best, "write bandwidth"
    return best, "step" if optimum_s == step_s else "stall"


def _reason(bound: Bound, save_s: float, mtbf_s: float, write_s: float) -> str:
    rule = f"Daly's optimum for saves that stall {save_s:.3g} s and a failure every {mtbf_s / 3600:.3g} h"
    rule = f"{rule} is {daly_interval(save_s, mtbf_s):.3g} s"
    if bound == "write bandwidth":
        return f"a save is durable after {write_s:.3g} s and may write {WRITE_SHARE:.0%} of the time; {rule}"
    return f"{rule}; the run is shorter" if bound == "run" else rule


def _costs(
    run_s: float, interval_s: float | None, save_s: float, restart_s: float, mtbf_s: float, write_s: float
) -> _Costs:
    interval_s = interval_s or run_s
    interval_s = min(run_s, interval_s * max(1, math.ceil(write_s / interval_s)))
    segments = math.floor(run_s / interval_s + SAME)
    rest_s = run_s - segments * interval_s
    rest_s = rest_s if rest_s > SAME * interval_s else 0.0
    saves = segments + (rest_s > 0)
    if mtbf_s == math.inf:
        return _Costs(saves, saves * save_s, 0.0, 0.0)
    stall_s = saves * save_s
    try:
        failed = segments * math.expm1((interval_s + save_s) / mtbf_s)
        failed += math.expm1((rest_s + save_s) / mtbf_s) if rest_s else 0.0
        # Every segment but the first begins while the save before it is written.
        late_s = failed * write_s * (1 - 1 / saves)
        rework_s = failed * mtbf_s - (run_s + stall_s) + late_s
        restarts_s = failed * mtbf_s * math.expm1(restart_s / mtbf_s)
    except OverflowError:
        rework_s = restarts_s = math.inf
    return _Costs(saves, stall_s, max(0.0, rework_s), restarts_s)


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        least = 0 if name in ("save_s", "restart_s") else math.ulp(0)
        if not least <= number < math.inf:
            raise UsageError(f"{name} cannot be {number:g}", hint="use a positive number" if least else "use 0 or more")
