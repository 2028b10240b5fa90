"""Synthetic job traces with the statistics of real clusters that train large models.

Only summaries of such clusters are public: the numbers below are from `acme_cluster_summary.csv` of the Acme traces
(CC-BY-4.0; "Characterization of Large Language Model Development in the Datacenter", NSDI 2024). Fitted are the mean,
median and longest run time, the mean, median and largest gang, and the GPU-seconds of a mean job, which tell how much
longer large gangs run than small ones. Gangs are powers of two: single GPUs, and from two on each doubling is rarer by
the same factor. Run times per size are log-normal, cut at the longest, and their medians grow with a power of the size.
Not in the summaries, and so only assumed: jobs arrive at random, twice as many by day as by night; six tenants submit
in proportion to 1, 1/2, 1/3 ...; and as many jobs arrive per day as load the cluster to a given share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headway.cluster.simulate.job_trace import JobTrace, apportion
from headway.errors import UsageError

DAY_S = 86400.0
TENANTS = 6
SINGLE = 0.6
"""Share of single-GPU jobs, where the median is one."""


@dataclass(frozen=True)
class Workload:
    """Statistics of the GPU jobs of a cluster."""

    jobs: int
    mean_s: float
    median_s: float
    longest_s: float
    mean_gpus: float
    largest: int
    gpu_s: float
    """Of all jobs together."""


WORKLOADS = {
    "acme-like": Workload(19_907, 1259.689, 124.0, 625_740.0, 26.77, 1024, 5_333_180_061.0),
    "seren-like": Workload(663_813, 1414.335, 122.0, 1_209_604.0, 5.68, 1024, 21_510_624_587.0),
}
"""Acme's Kalos, where models are pretrained, and its Seren."""


SINGLE_GPU = "single-gpu"
"""The workload of `draw_single_gpu_trace`."""
SINGLE_GPU_JOBS, SINGLE_GPU_LOAD, USUAL_LOAD = 4000, 0.7, 0.8


def generate_trace(name: str, gpus: int, jobs: int | None = None, load: float | None = None, seed: int = 0) -> JobTrace:
    """Return a trace that loads a cluster of `gpus` to a share of `load`. Deterministic."""
    if name == SINGLE_GPU:
        if gpus < 16:
            raise UsageError(f"{name} has gangs of 16 GPUs; the cluster has {gpus}", hint="choose a larger cluster")
        return draw_single_gpu_trace(gpus, jobs or SINGLE_GPU_JOBS, SINGLE_GPU_LOAD if load is None else load, seed)
    load = USUAL_LOAD if load is None else load
    if name not in WORKLOADS:
        raise UsageError(f"unknown workload '{name}'", hint=f"known workloads: {', '.join((*WORKLOADS, SINGLE_GPU))}")
    workload = WORKLOADS[name]
    if gpus < workload.largest:
        message = f"{name} has gangs of {workload.largest:,} GPUs; the cluster has {gpus:,}"
        raise UsageError(message, hint="choose a larger cluster with --on")
    return draw_trace(workload, gpus, jobs or workload.jobs, load, seed)


def draw_single_gpu_trace(gpus: int, jobs: int, load: float, seed: int) -> JobTrace:
    """Return single-GPU jobs, 2 % of which run for more than a day, and one in a hundred a gang of 8 or 16 GPUs.

    All of it is assumed, for a small cluster of nodes of 8: run times are log-normal with a median of half an hour and
    a spread of 1.9, up to 8 days; those of gangs have a median of 2 hours and a spread of 1.2. Four tenants.
    """
    rng = np.random.default_rng((seed, 3))
    gang = np.zeros(jobs, np.bool_)
    gang[rng.permutation(jobs)[: max(round(jobs / 100), 1)]] = True
    scores = rng.standard_normal(jobs)
    seconds = np.where(gang, 7200 * np.exp(1.2 * scores), 1800 * np.exp(1.9 * scores))
    durations = np.ceil(np.clip(seconds, 20.0, 8 * DAY_S))
    sizes = np.where(gang, rng.choice([8, 8, 16], jobs), 1).astype(np.int64)
    submit = np.floor(_times(jobs, float((durations * sizes).sum()) / (gpus * load), rng))
    tenant = rng.choice(4, jobs, p=np.array([12, 6, 4, 3]) / 25).astype(np.int64)
    unknown = np.full(jobs, math.nan)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)),
        submit,
        durations,
        sizes,
        tenant,
        tuple(f"team-{number}" for number in range(4)),
        unknown,
        unknown.copy(),
    )


def draw_trace(workload: Workload, gpus: int, jobs: int, load: float, seed: int) -> JobTrace:
    """Return a trace with the statistics of a workload."""
    rng = np.random.default_rng(seed)
    fit = _Fit.of(workload)
    classes = rng.permutation(np.repeat(np.arange(len(fit.shares)), apportion(fit.shares * jobs, jobs)))
    durations = np.empty(jobs)
    normal = NormalDist()
    for number in range(len(fit.shares)):
        rows = np.flatnonzero(classes == number)
        # stratified: one draw from each of as many equal parts, since means of heavy tails are else a matter of luck
        parts = (rng.permutation(len(rows)) + rng.random(len(rows))) / max(len(rows), 1)
        scores = np.array([normal.inv_cdf(min(max(part, 1e-12), 1 - 1e-12)) for part in parts.tolist()])
        durations[rows] = np.exp(fit.centres[number] + fit.spread * scores)
    durations = np.ceil(np.minimum(durations, workload.longest_s))
    sizes = 2**classes
    span = float((durations * sizes).sum()) / (gpus * load)
    submit = np.floor(_times(jobs, span, rng))
    weights = 1 / np.arange(1, TENANTS + 1)
    tenant = rng.choice(TENANTS, jobs, p=weights / weights.sum())
    unknown = np.full(jobs, math.nan)
    return JobTrace(
        tuple(f"job-{number}" for number in range(jobs)),
        submit,
        durations,
        sizes.astype(np.int64),
        tenant.astype(np.int64),
        tuple(f"team-{number}" for number in range(TENANTS)),
        unknown,
        unknown.copy(),
    )


def _times(jobs: int, span: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return sorted times within a span, twice as dense at noon as at midnight."""
    grid = np.linspace(0.0, span, max(int(span // 600), 2) + 1)
    # the integral of 1 - cos(day) / 3
    passed = grid - np.sin(2 * np.pi * grid / DAY_S) * DAY_S / (2 * np.pi) / 3
    times: NDArray[np.float64] = np.interp(np.sort(rng.random(jobs)) * passed[-1], passed, grid)
    return times


@dataclass(frozen=True)
class _Fit:
    """Gangs of 1, 2, 4 ... GPUs: their shares, and the logarithms of their median run times."""

    shares: NDArray[np.float64]
    centres: NDArray[np.float64]
    spread: float
    """Standard deviation of the logarithm of run times."""

    @classmethod
    @cache
    def of(cls, workload: Workload) -> "_Fit":
        sizes: NDArray[np.float64] = np.exp2(np.arange(int(math.log2(workload.largest)) + 1, dtype=np.float64))
        longest = workload.longest_s
        shares = _shares(workload, sizes)
        gpus = workload.gpu_s / (workload.jobs * workload.mean_s)  # of a mean second

        def centres(power: float, spread: float) -> NDArray[np.float64]:
            grown = power * np.log(sizes)
            base = _root(lambda at: float(shares @ _mean(at + grown, spread, longest)) - workload.mean_s, -20, 14)
            shifted: NDArray[np.float64] = base + grown
            return shifted

        def spread_of(power: float) -> float:
            middle = math.log(workload.median_s)
            return _root(lambda at: float(shares @ _below(middle, centres(power, at), at)) - 0.5, 0.3, 5.0)

        def excess(power: float) -> float:
            spread = spread_of(power)
            means = _mean(centres(power, spread), spread, longest)
            return float(shares @ (sizes * means)) / workload.mean_s - gpus

        power = _root(excess, 0.0, 1.5)
        spread = spread_of(power)
        return cls(shares, centres(power, spread), spread)


def _shares(workload: Workload, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return shares of gang sizes that have the mean of a workload."""

    def shares(ratio: float) -> NDArray[np.float64]:
        rest = ratio ** np.arange(len(sizes) - 1)
        return np.concatenate(([SINGLE], (1 - SINGLE) * rest / rest.sum()))

    return shares(_root(lambda ratio: float(shares(ratio) @ sizes) - workload.mean_gpus, 0.01, 2.0))


def _below(at: float | NDArray[np.float64], centres: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return the shares of normal distributions below a point."""
    scores = (at - centres) / (spread * math.sqrt(2))
    return np.array([0.5 * math.erfc(-score) for score in scores.tolist()])


def _mean(centres: NDArray[np.float64], spread: float, longest: float) -> NDArray[np.float64]:
    """Return the means of log-normal run times, cut at the longest."""
    end = math.log(longest)
    uncut: NDArray[np.float64] = np.exp(centres + spread**2 / 2) * _below(end, centres + spread**2, spread)
    return uncut + longest * (1 - _below(end, centres, spread))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a monotonic function crosses zero, by bisection."""
    rises = function(high) > 0
    for _ in range(26):
        middle = (low + high) / 2
        low, high = (low, middle) if (function(middle) > 0) == rises else (middle, high)
    return (low + high) / 2
