"""Simulates pipeline schedules: step time, busy time per rank, and microbatches in flight.

    gpipe        every forward, then every backward (Huang et al. 2019, arXiv:1811.06965)
    1f1b         forwards and backwards alternate, so that rank r holds ranks - r microbatches (arXiv:2104.04473)
    interleaved  1f1b with several chunks of layers per rank, as in Megatron-LM: a smaller bubble, more memory and more
                 transfers (same paper)
    zero-bubble  ZB-H1: 1f1b with the weight gradients split off and used to fill the end (arXiv:2401.10241)

Each rank runs a fixed list of operations in order; an operation starts when the rank is free and its input has arrived.
The list depends on counts, not on times: zero-bubble is never slower than 1f1b on equal stages, but may be on unequal
ones, where a rank could have computed weight gradients while it waited.

The lists are simulated in rounds, aligned so that every input comes from the previous round, or from a neighbour in the
same round. The state after a round is two or three numbers per rank, and a step fills, runs steadily and drains. All
steady rounds are alike: each adds constants and takes maxima, so that states which differ by one constant in all their
numbers keep that difference. Once a state recurs up to a shift it cycles forever, and full cycles are skipped. Cycles
are detected, never assumed: if two ranks are nearly equal, hundreds of microbatches may pass before one starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import inf

from headway.errors import UsageError, plural

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

# Relative tolerance for two states that agree up to a shift. Rounding adds about 1e-16 per round; skipping m
# microbatches multiplies the rest by at most m.
SAME = 1e-13

State = tuple[list[float], ...]
Round = Callable[[State, int], State]


@dataclass(frozen=True)
class StageTime:
    """Times of one microbatch on one virtual stage, a chunk of layers."""

    forward: float
    """Seconds of the forward pass."""
    input_grad: float
    """Seconds of the backward pass with respect to the input."""
    weight_grad: float
    """Seconds of the backward pass with respect to the weights."""

    def __post_init__(self) -> None:
        times = (self.forward, self.input_grad, self.weight_grad)
        assert all(0 <= time < inf for time in times), f"invalid stage times {times}"

    @property
    def backward(self) -> float:
        """Seconds of the full backward pass."""
        return self.input_grad + self.weight_grad

    @property
    def total(self) -> float:
        """Seconds of all work on one microbatch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule over all microbatches."""

    seconds: float
    """From the start of the first forward to the end of all work, over all ranks."""
    busy: tuple[float, ...]
    """Seconds of compute, by rank."""
    in_flight: tuple[int, ...]
    """By rank, the most (microbatch, chunk) forwards whose backward, weight gradients included, is outstanding."""

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The bubble: idle share of the time, by rank."""
        return tuple(1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy)


def check_schedule(schedule: str, ranks: int, chunks: int, microbatches: int, layers: int) -> None:
    """Raise UsageError with a hint if the schedule cannot run.

    `chunks` is the number of virtual stages per rank; each needs at least one of the `layers`.
    """
    _check_counts(schedule, ranks, chunks, microbatches)
    if layers < ranks * chunks:
        raise UsageError(
            f"{plural(layers, 'layer')} cannot fill {ranks * chunks} pipeline stages ({ranks} ranks x {chunks} chunks)",
            hint=f"ranks x chunks may be at most {layers}",
        )


def _check_counts(schedule: str, ranks: int, chunks: int, microbatches: int) -> None:
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown pipeline schedule {schedule!r}", hint=f"schedules: {', '.join(SCHEDULES)}")
    for name, count in (("ranks", ranks), ("chunks", chunks), ("microbatches", microbatches)):
        if count < 1:
            raise UsageError(f"a pipeline cannot have {count} {name}", hint=f"{name} must be 1 or more")
    if schedule != "interleaved":
        if chunks != 1:
            raise UsageError(
                f"{schedule} runs one chunk of layers per rank, not {chunks}", hint="use interleaved, or chunks = 1"
            )
        return
    if chunks == 1:
        raise UsageError("interleaved needs at least two chunks per rank", hint="use 1f1b, or chunks = 2")
    if microbatches % ranks:
        more = microbatches + ranks - microbatches % ranks
        fewer = f"{more - ranks} or " if more > ranks else ""
        raise UsageError(
            f"interleaved needs a multiple of {ranks} microbatches on {ranks} ranks, got {microbatches}",
            hint=f"use {fewer}{more} microbatches",
        )


def simulate(
    schedule: str, stages: Sequence[StageTime], ranks: int, microbatches: int, transfer_s: float = 0.0
) -> Timeline:
    """Simulate one step of `microbatches` through `stages`; virtual stage i is on rank i % ranks.

    `transfer_s` is the time from the end of an operation to the arrival of its output; it occupies neither rank.
    """
    assert ranks > 0, f"{ranks} ranks"
    assert len(stages) % ranks == 0, f"{len(stages)} stages on {ranks} ranks"
    assert 0 <= transfer_s < inf, f"invalid transfer time {transfer_s}"
    _check_counts(schedule, ranks, len(stages) // ranks, microbatches)
    return _timeline(schedule, tuple(stages), ranks, microbatches, transfer_s if ranks > 1 else 0.0)


@lru_cache(maxsize=4096)
def _timeline(
    schedule: str, stages: tuple[StageTime, ...], ranks: int, microbatches: int, transfer_s: float
) -> Timeline:
    if schedule == "gpipe":
        seconds = _gpipe(stages, microbatches, transfer_s)
    elif not transfer_s and stages.count(stages[0]) == len(stages):
        seconds = _even(schedule, stages[0], ranks, len(stages) // ranks, microbatches)
    elif schedule == "interleaved":
        seconds = _interleaved(stages, ranks, microbatches, transfer_s)
    else:
        seconds = _one_chunk(schedule == "zero-bubble", stages, microbatches, transfer_s)
    busy = tuple(microbatches * sum(stage.total for stage in stages[rank::ranks]) for rank in range(ranks))
    return Timeline(seconds, busy, in_flight(schedule, ranks, len(stages) // ranks, microbatches))


@lru_cache(maxsize=16384)
def in_flight(schedule: str, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """By rank, the most (microbatch, chunk) forwards whose backward is outstanding.

    That is the number of forwards before the first backward (zero-bubble: before the first weight gradients).
    """
    most = {
        "gpipe": [microbatches] * ranks,
        "1f1b": [ranks - rank for rank in range(ranks)],
        "interleaved": [2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 for rank in range(ranks)],
        # Rank r defers the weight gradients of r microbatches, so all ranks hold as many as 1f1b's first.
        "zero-bubble": [ranks] * ranks,
    }[schedule]
    return tuple(min(count, microbatches * chunks) for count in most)


def _gpipe(stages: Sequence[StageTime], microbatches: int, transfer_s: float) -> float:
    """Closed form for any stages: a flow shop of equal jobs.

    Jobs take the time of one through all machines plus, for each further one, that of the slowest machine. The
    backwards are a second flow shop, which starts when the last stage is done.
    """
    forwards, backwards = [stage.forward for stage in stages], [stage.backward for stage in stages]
    rows = (sum(row) + (microbatches - 1) * max(row) + (len(stages) - 1) * transfer_s for row in (forwards, backwards))
    return sum(rows)


def _even(schedule: str, stage: StageTime, ranks: int, chunks: int, microbatches: int) -> float:
    """Closed form for equal stages and free transfers.

    1f1b and interleaved: a rank's work and ranks - 1 idle turns of one chunk. zero-bubble, with at least as many
    microbatches as ranks: the idle turns shrink to forward + input_grad - weight_grad, or to the longer of forward and
    input_grad if weight_grad exceeds either. Missing microbatches leave their turns unfilled.
    """
    work = microbatches * chunks * stage.total
    if schedule != "zero-bubble":
        return work + (ranks - 1) * stage.total
    forward, input_grad = stage.forward, stage.input_grad
    turn = max(forward, input_grad, forward + input_grad - stage.weight_grad)
    filled = min(microbatches, ranks)
    return work + (filled - 1) * turn + (ranks - filled) * (forward + input_grad)


def _one_chunk(split: bool, stages: Sequence[StageTime], microbatches: int, transfer_s: float) -> float:
    """1f1b and zero-bubble (`split`), in rounds.

    In round k rank r runs, if they exist, the forward of microbatch k + ranks - 1 - r, the backward of
    microbatch k, and with `split` the weight gradients of microbatch k - r. The input of a forward comes from the
    previous round, that of a backward from this one. The state is when each rank is free and its last forward ended.
    """
    ranks = len(stages)
    forward = [stage.forward for stage in stages]
    backward = [stage.input_grad if split else stage.backward for stage in stages]
    weight = [stage.weight_grad if split else 0.0 for stage in stages]

    def step(state: State, k: int) -> State:
        free, sent = list(state[0]), list(state[1])
        active = slice(max(0, k + ranks - microbatches), min(ranks, k + ranks))
        inputs = [-inf, *sent]
        sent[active] = free[active] = _run(free[active], inputs[active], transfer_s, forward[active])
        if k < 0:
            return free, sent
        arrival = 0.0
        for rank in range(ranks - 1, -1, -1):
            begin = free[rank]
            end = (begin if begin > arrival else arrival) + backward[rank]
            arrival = end + transfer_s
            free[rank] = end + weight[rank] if k >= rank else end
        return free, sent

    start = [0.0] * ranks
    steady = range(ranks - 1 if split else 0, microbatches - ranks + 1)
    free, _ = _rounds(step, (start, start), range(1 - ranks, microbatches), steady)
    return max(end + min(rank, microbatches) * weight[rank] for rank, end in enumerate(free))


def _interleaved(stages: Sequence[StageTime], ranks: int, microbatches: int, transfer_s: float) -> float:
    """Megatron-LM's interleaved 1f1b, in rounds.

    Every rank takes microbatches in groups of `ranks`: a group's forwards chunk by chunk, its backwards chunk by
    chunk from the last. Counted in that order, rank r runs in round n forward n - r and backward
    n - (len(stages) - 1) - (ranks - 1 - r), if they exist. Their inputs come from the previous round: from the
    neighbour, or around the ring where a chunk ends. The state is when each rank is free, and when its last forward
    and its last backward ended.
    """
    group, jobs, lag = len(stages), microbatches * len(stages) // ranks, len(stages) + ranks - 2
    chunks = [stages[first : first + ranks] for first in range(0, group, ranks)]
    forwards = [[stage.forward for stage in chunk] for chunk in chunks]
    backwards = [[stage.backward for stage in chunk] for chunk in reversed(chunks)]

    def step(state: State, n: int) -> State:
        free, sent, returned = (list(ends) for ends in state)
        active = slice(max(0, n - jobs + 1), min(ranks, n + 1))
        if active.start < active.stop:
            # A rank stays on a chunk for `ranks` turns, one turn behind the previous rank: a round spans two chunks.
            chunk, turn = divmod(n % group, ranks)
            times = forwards[chunk][: turn + 1] + forwards[chunk - 1][turn + 1 :]
            inputs = [sent[-1] if chunk else -inf, *sent]
            sent[active] = free[active] = _run(free[active], inputs[active], transfer_s, times[active])
        active = slice(max(0, lag - n), min(ranks, lag - n + jobs))
        if active.start < active.stop:
            chunk, turn = divmod((n + 2 - ranks) % group, ranks)
            times = backwards[chunk][: ranks - turn] + backwards[chunk + 1 - len(chunks)][ranks - turn :]
            inputs = [*returned[1:], returned[0] if (n + 1) % group >= ranks else -inf]
            returned[active] = free[active] = _run(free[active], inputs[active], transfer_s, times[active])
        return free, sent, returned

    start = [0.0] * ranks
    free, _, _ = _rounds(step, (start, start, start), range(lag + jobs), range(lag, jobs), period=group)
    return max(free)


def _run(free: list[float], inputs: list[float], transfer_s: float, times: list[float]) -> list[float]:
    """When one operation per rank ends, given when the rank is free and when its input was sent."""
    rows = zip(free, inputs, times, strict=True)
    return [(ready if ready > (arrival := sent + transfer_s) else arrival) + time for ready, sent, time in rows]


def _rounds(step: Round, state: State, rounds: range, steady: range, period: int = 1) -> State:
    """The state after all rounds; steady round n does the same work as round n + period."""
    if len(steady) <= period:
        steady = range(rounds.stop, rounds.stop)
    for n in range(rounds.start, steady.start):
        state = step(state, n)
    state = _steady(step, state, steady, period)
    for n in range(steady.stop, rounds.stop):
        state = step(state, n)
    return state


def _steady(step: Round, state: State, rounds: range, period: int) -> State:
    """The state after the steady rounds, with full cycles skipped.

    Brent's cycle detection: the state is compared with a mark that moves at doubling distances, at the cost of one
    comparison per period.
    """
    n, mark, marked_at, patience = rounds.start, state, rounds.start, period
    while n < rounds.stop:
        state = step(state, n)
        n += 1
        if (n - marked_at) % period:
            continue
        shift = _shift(mark, state)
        if shift is not None:
            cycle = n - marked_at
            skipped = (rounds.stop - n) // cycle
            state = tuple([end + skipped * shift for end in ends] for ends in state)
            n += skipped * cycle
        if n - marked_at >= patience:
            mark, marked_at, patience = state, n, 2 * patience
    return state


def _shift(earlier: State, later: State) -> float | None:
    """The common shift of all times; None if they shifted differently."""
    shift = later[0][0] - earlier[0][0]
    slack = SAME * later[0][0]
    # The last rank mostly settles last: checking it first saves most comparisons.
    if abs(later[0][-1] - earlier[0][-1] - shift) > slack:
        return None
    pairs = zip(chain(*earlier), chain(*later), strict=True)
    return shift if all(abs(b - a - shift) <= slack for a, b in pairs) else None
