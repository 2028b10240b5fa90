"""Goodput under failures: the optimal checkpoint interval and the useful share of the wall time.

The model is Daly's (A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22, 2006).
Failures hit the whole job at a constant rate, one in M seconds, during steps, saves and restarts. The run is cut into
segments of work and a save; a failure discards the work of its segment and is followed by a restart of R seconds, which
may fail as well. A segment of L seconds then takes on average

    M exp(R / M) (exp(L / M) - 1)

which is exact: L itself, M (exp(L / M) - 1) - L of discarded work, and (exp(L / M) - 1) restarts that take
M (exp(R / M) - 1) each, with their own failures. Every run ends with a save.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.errors import UsageError

LOCAL_DISK_BYTES_S = 1.25e9
"""Write rate of an H200 host's local disk; measured."""

DEVICE_TO_HOST_BYTES_S = 55e9
"""From an H200 to pinned host memory; measured (benchmarks/results/state_h200.json)."""
CPU_COPY_BYTES_S = 8e9
"""Memory to memory by one worker; measured."""
_HIDDEN = 0.9  # share of a step that the copy overlaps with: its passes; the optimizer waits for the copy
_LEAST_STALL_S = 0.005

# Relative to an interval: a shorter remainder of the run is rounding.
SAME = 1e-9


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
    higher-order optimum, spread evenly over the run. No save begins before the last one is durable, which takes
    `write_s`.
    """
    _check(run_s=run_s, devices=devices, save_s=save_s, restart_s=restart_s, step_s=step_s)
    if interval_s is not None:
        _check(interval_s=interval_s)
    mtbf_s = math.inf
    if gpu_hours_between_failures is not None:
        _check(gpu_hours_between_failures=gpu_hours_between_failures)
        mtbf_s = gpu_hours_between_failures * 3600 / devices
    steps = max(1, math.ceil(run_s / step_s * (1 - SAME)))
    if interval_s is not None:
        every, why = min(steps, max(1, round(interval_s / step_s))), "as given, in full steps"
    elif mtbf_s < math.inf:
        every, why = _best_steps(run_s, steps, step_s, save_s, restart_s, mtbf_s, write_s)
    else:
        every, why = None, "saves only at the end: no failure rate is known"
    costs = _costs(run_s, every and every * step_s, save_s, restart_s, mtbf_s)
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


def save_seconds(
    state_bytes_per_device: float,
    devices_per_node: int,
    nodes: int,
    disk_bytes_s_per_node: float = LOCAL_DISK_BYTES_S,
    *,
    shared_bytes_s: float | None = None,
) -> float:
    """Seconds until a save is durable: every node writes the state of its devices at the same time.

    `state_bytes_per_device` is what a device writes; replicas do not write twice. `shared_bytes_s` limits all nodes
    together if they write to one store.
    """
    _check(devices_per_node=devices_per_node, nodes=nodes, disk_bytes_s_per_node=disk_bytes_s_per_node)
    node_bytes = state_bytes_per_device * devices_per_node
    shared_s = 0.0 if shared_bytes_s is None else node_bytes * nodes / shared_bytes_s
    return max(node_bytes / disk_bytes_s_per_node, shared_s)


def _best_steps(
    run_s: float, steps: int, step_s: float, save_s: float, restart_s: float, mtbf_s: float, write_s: float
) -> tuple[int, str]:
    """Steps between saves, and why.

    Equal segments cost least for their number, and the cost is convex in that number: the best is one of the two
    integers around the optimum of an endless run.
    """
    optimum_s = max(step_s, write_s, daly_interval(save_s, mtbf_s))
    segments = max(1, math.floor(run_s / optimum_s))
    rounded = min(steps, max(1, round(optimum_s / step_s)))
    choices = {rounded, math.ceil(steps / segments), math.ceil(steps / (segments + 1))}

    def lost_s(every: int) -> float:
        return _costs(run_s, every * step_s, save_s, restart_s, mtbf_s).lost_s

    best = min(sorted(choices), key=lost_s)
    rule = f"Daly's optimum for saves of {save_s:.3g} s and a failure every {mtbf_s / 3600:.3g} h"
    return best, f"{rule} is {daly_interval(save_s, mtbf_s):.3g} s"


def _costs(run_s: float, interval_s: float | None, save_s: float, restart_s: float, mtbf_s: float) -> _Costs:
    interval_s = interval_s or run_s
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
        rework_s = failed * mtbf_s - (run_s + stall_s)
        restarts_s = failed * mtbf_s * math.expm1(restart_s / mtbf_s)
    except OverflowError:
        rework_s = restarts_s = math.inf
    return _Costs(saves, stall_s, max(0.0, rework_s), restarts_s)


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        least = 0 if name in ("save_s", "restart_s") else math.ulp(0)
        if not least <= number < math.inf:
            raise UsageError(f"{name} cannot be {number:g}", hint="use a positive number" if least else "use 0 or more")
