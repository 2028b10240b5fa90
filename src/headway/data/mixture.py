"""Which data set, and which window of it, sample n of a mixture is: a pure function of n, like the order of one.

Samples are cut into phases, in which the weights stay the same. People think in steps, so weights change at steps; the
first sample of such a step (see `headway.data.steps`) begins a phase, whatever batches and skipped samples came before.
Inside a phase data sets take turns by a table that is repeated: after every number of samples, each data set has had
its exact share of them, rounded down or up. So the number of a sample within its own data set is arithmetic too, and
every data set is gone through in its own order, without gaps or repeats, as if it were alone.

A table is the schedule of a periodic real-time system: sample j of a data set with share w must come in one of the
places floor(j / w) to ceil((j + 1) / w) - 1, and taking the one whose time is up first always succeeds. (Each gets w of
every place in a fractional schedule that keeps these times, and where there is a fractional matching there is a whole
one.) Since a table is regular, the rows of a step are dealt out by lot: otherwise a worker could see the same data set
for ever.
"""

import functools
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from headway.data.order import Ids, Split, order_at, shuffled
from headway.errors import DataError

__all__ = ["DataMixture", "MixturePhase", "dealt_rows", "mixed_order_at", "samples_before", "shares_of"]

MOST_PLACES = 1 << 16
"""Places in a table: shares are multiples of 1 / 65,536 at the finest."""


def shares_of(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Weights as exact shares of one, read as decimals: 0.7 and 0.3 are 7/10 and 3/10, 1 and 2 are 1/3 and 2/3.

    Shares that have no common denominator up to 65,536 are rounded to multiples of 1 / 65,536.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    if total <= 0:
        raise DataError("all weights are 0", hint="give one data set a weight")
    shares = [weight / total for weight in exact]
    if math.lcm(*(share.denominator for share in shares)) > MOST_PLACES:
        shares = _rounded(shares)
        for weight, share in zip(exact, shares, strict=True):
            if weight and not share:
                raise DataError(
                    f"a weight of {float(weight):g} in {float(total):g} is less than one sample in {MOST_PLACES:,}",
                    hint="raise it, or leave that data set out",
                )
    return tuple(shares)


def _rounded(shares: Sequence[Fraction]) -> list[Fraction]:
    """Shares as multiples of the finest, those with the largest remainders rounded up."""
    whole = [int(share * MOST_PLACES) for share in shares]
    rest = [share * MOST_PLACES - count for share, count in zip(shares, whole, strict=True)]
    for index in sorted(range(len(rest)), key=lambda i: (-rest[i], i))[: MOST_PLACES - sum(whole)]:
        whole[index] += 1
    return [Fraction(count, MOST_PLACES) for count in whole]


@dataclass(frozen=True)
class MixturePhase:
    """A stretch of samples in which each data set has the same share."""

    first: int
    """The number of its first sample; it ends where the next begins."""
    shares: tuple[Fraction, ...]


@dataclass(frozen=True)
class DataMixture:
    """Several data sets in shares. Windows are numbered through, those of the first data set first."""

    splits: tuple[Split, ...]
    phases: tuple[MixturePhase, ...]
    key: str
    """The data's version: which data set a sample is of is the same whatever the run's seed."""

    def __post_init__(self) -> None:
        assert self.phases[0].first == 0, "the first phase begins with sample 0"
        assert all(len(phase.shares) == len(self.splits) for phase in self.phases), "a share for each data set"

    @functools.cached_property
    def windows(self) -> int:
        """Windows of all data sets together."""
        return sum(split.windows for split in self.splits)

    @functools.cached_property
    def first_windows(self) -> tuple[int, ...]:
        """The number of each data set's first window."""
        return tuple(accumulate((split.windows for split in self.splits[:-1]), initial=0))

    @functools.cached_property
    def _turns(self) -> tuple["_Turns", ...]:
        """How data sets take turns in each phase, and how many samples each has had before it."""
        had = [0] * len(self.splits)
        made: list[_Turns] = []
        for index, phase in enumerate(self.phases):
            if made:
                had = made[-1].before(phase.first - self.phases[index - 1].first)
            made.append(_turns(had, phase.shares))
        return tuple(made)


def mixed_order_at(mixture: DataMixture, seed: int, first: int, offsets: Ids) -> Ids:
    """Window ids of the samples number first + each of `offsets`, as `order_at` gives them of one data set."""
    which, number = _look_up(mixture, first + offsets)
    ids = np.empty_like(number)
    for index, (split, start) in enumerate(zip(mixture.splits, mixture.first_windows, strict=True)):
        mine = np.flatnonzero(which == index)
        if mine.size:
            least = int(number[mine].min())
            ids[mine] = order_at(split, seed, least, number[mine] - least) + start
    return ids


def dealt_rows(mixture: DataMixture, cursors: Ids, batch: int, rows: Ids) -> Ids:
    """[cursors, rows]: which sample of its step's batch each row is, for steps that begin at these cursors."""
    return shuffled(rows, batch, cursors, mixture.key, "rows")


def samples_before(mixture: DataMixture, number: int) -> list[int]:
    """How many of a run's first `number` samples are of each data set."""
    index = bisect_right([phase.first for phase in mixture.phases], number) - 1
    return mixture._turns[index].before(number - mixture.phases[index].first)


def _look_up(mixture: DataMixture, samples: Ids) -> tuple[npt.NDArray[np.intp], Ids]:
    """For each sample its data set, and its number among the samples of that data set."""
    phase_of = np.searchsorted([phase.first for phase in mixture.phases], samples, side="right") - 1
    which = np.empty(samples.shape, dtype=np.intp)
    number = np.empty(samples.shape, dtype=np.int64)
    for index in np.unique(phase_of).tolist():
        here = np.flatnonzero(phase_of == index)
        which[here], number[here] = mixture._turns[index].at(samples[here] - mixture.phases[index].first)
    return which, number


@dataclass(frozen=True)
class _Turns:
    """How data sets take turns in one phase."""

    had: Ids
    """Samples of each data set before this phase."""
    places: npt.NDArray[np.intp]
    """The data set at each place of the table."""
    ranks: Ids
    """How often that data set came before in the table."""
    counts: Ids
    """How often each data set comes in the table."""

    def at(self, samples: Ids) -> tuple[npt.NDArray[np.intp], Ids]:
        """Data sets of samples of this phase, numbered from 0, and their numbers within those."""
        turn, place = np.divmod(samples, len(self.places))
        which = self.places[place]
        number = self.had[which] + turn * self.counts[which] + self.ranks[place]
        return which, number.astype(np.int64, copy=False)

    def before(self, number: int) -> list[int]:
        """Samples of each data set before sample `number` of this phase."""
        turn, place = divmod(number, len(self.places))
        part = np.bincount(self.places[:place], minlength=len(self.had))
        return [int(count) for count in self.had + turn * self.counts + part]


def _turns(had: Sequence[int], shares: Sequence[Fraction]) -> _Turns:
    """How data sets take turns that have had so many samples before."""
    size = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * size) for share in shares]
    places = np.array(list(_schedule(counts)), dtype=np.intp)
    ranks = np.empty(size, dtype=np.int64)
    for index, count in enumerate(counts):
        ranks[places == index] = np.arange(count)
    return _Turns(np.array(had, dtype=np.int64), places, ranks, np.array(counts, dtype=np.int64))


def _schedule(counts: Sequence[int]) -> Iterator[int]:
    """The data set at each place: of those whose turn may come, the one whose time is up first."""
    size = sum(counts)
    jobs = sorted((j * size // n, -((-j - 1) * size // n), index) for index, n in enumerate(counts) for j in range(n))
    waiting: list[tuple[int, int]] = []
    released = 0
    for place in range(size):
        while released < size and jobs[released][0] <= place:
            heapq.heappush(waiting, jobs[released][1:])
            released += 1
        due, index = heapq.heappop(waiting)
        assert due > place, "earliest deadline first keeps every deadline that can be kept"
        yield index
