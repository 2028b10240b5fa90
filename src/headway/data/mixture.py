"""Which dataset and which window sample n of a mixture is: a pure function of n, like the order of one dataset.

Samples are divided into phases of constant weights. People think in steps, so weights change at steps; the first sample
of such a step (see `headway.data.steps`) starts a phase, whatever batches and skipped samples came before. Within a
phase datasets alternate by a repeated table: after any number of samples, each dataset has had its exact share of
them, rounded down or up. So the number of a sample within its own dataset is arithmetic too, and every dataset is
traversed in its own order, without gaps or repeats, as if it were alone.

A table is the schedule of a periodic real-time system: sample j of a dataset with share w must be in one of the slots
floor(j / w) to ceil((j + 1) / w) - 1, and earliest deadline first always succeeds. (A fractional schedule that gives
each dataset w of every slot meets these deadlines, and a fractional matching implies an integral one.) Since a table
is regular, the rows of a step are shuffled: otherwise a worker could see the same dataset for ever.
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

MAX_SLOTS = 1 << 16
"""Slots of a table: shares are multiples of 1 / 65,536 at the finest."""


def shares_of(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Return weights as exact fractions, read as decimals: 0.7 and 0.3 are 7/10 and 3/10, 1 and 2 are 1/3 and 2/3.

    Shares without a common denominator up to 65,536 are rounded to multiples of 1 / 65,536.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    if total <= 0:
        raise DataError("all weights are 0", hint="give at least one dataset a weight")
    shares = [weight / total for weight in exact]
    if math.lcm(*(share.denominator for share in shares)) > MAX_SLOTS:
        shares = _rounded(shares)
        for weight, share in zip(exact, shares, strict=True):
            if weight and not share:
                raise DataError(
                    f"a weight of {float(weight):g} in {float(total):g} is less than one sample in {MAX_SLOTS:,}",
                    hint="raise it, or remove that dataset",
                )
    return tuple(shares)


def _rounded(shares: Sequence[Fraction]) -> list[Fraction]:
    """Round shares to multiples of the finest; those with the largest remainders are rounded up."""
    counts = [int(share * MAX_SLOTS) for share in shares]
    rest = [share * MAX_SLOTS - count for share, count in zip(shares, counts, strict=True)]
    for index in sorted(range(len(rest)), key=lambda i: (-rest[i], i))[: MAX_SLOTS - sum(counts)]:
        counts[index] += 1
    return [Fraction(count, MAX_SLOTS) for count in counts]


@dataclass(frozen=True)
class MixturePhase:
    """A range of samples in which the shares are constant."""

    first: int
    """Its first sample; it ends where the next phase begins."""
    shares: tuple[Fraction, ...]


@dataclass(frozen=True)
class DataMixture:
    """Several datasets in shares. Windows are numbered consecutively, those of the first dataset first."""

    splits: tuple[Split, ...]
    phases: tuple[MixturePhase, ...]
    key: str
    """The data version: the dataset of a sample does not depend on the run's seed."""

    def __post_init__(self) -> None:
        assert self.phases[0].first == 0, "the first phase begins with sample 0"
        assert all(len(phase.shares) == len(self.splits) for phase in self.phases), "one share per dataset"

    @functools.cached_property
    def windows(self) -> int:
        """Windows of all datasets."""
        return sum(split.windows for split in self.splits)

    @functools.cached_property
    def first_windows(self) -> tuple[int, ...]:
        """Id of each dataset's first window."""
        return tuple(accumulate((split.windows for split in self.splits[:-1]), initial=0))

    @functools.cached_property
    def _rotations(self) -> tuple["Rotation", ...]:
        """How datasets alternate in each phase."""
        before = [0] * len(self.splits)
        rotations: list[Rotation] = []
        for index, phase in enumerate(self.phases):
            if rotations:
                before = rotations[-1].counts_before(phase.first - self.phases[index - 1].first)
            rotations.append(rotation(before, phase.shares))
        return tuple(rotations)


def mixed_order_at(mixture: DataMixture, seed: int, first: int, offsets: Ids) -> Ids:
    """Return the window ids of samples first + `offsets`, like `order_at` for one dataset."""
    which, number = _look_up(mixture, first + offsets)
    ids = np.empty_like(number)
    for index, (split, start) in enumerate(zip(mixture.splits, mixture.first_windows, strict=True)):
        selected = np.flatnonzero(which == index)
        if selected.size:
            least = int(number[selected].min())
            ids[selected] = order_at(split, seed, least, number[selected] - least) + start
    return ids


def shuffled_rows(mixture: DataMixture, cursors: Ids, batch: int, rows: Ids) -> Ids:
    """Return [cursors, rows]: the sample of its batch that each row gets, for steps that begin at these cursors."""
    return shuffled(rows, batch, cursors, mixture.key, "rows")


def samples_before(mixture: DataMixture, number: int) -> list[int]:
    """Return how many of a run's first `number` samples come from each dataset."""
    index = bisect_right([phase.first for phase in mixture.phases], number) - 1
    return mixture._rotations[index].counts_before(number - mixture.phases[index].first)


def _look_up(mixture: DataMixture, samples: Ids) -> tuple[npt.NDArray[np.intp], Ids]:
    """Return the dataset of each sample, and its number among the samples of that dataset."""
    phase_of = np.searchsorted([phase.first for phase in mixture.phases], samples, side="right") - 1
    which = np.empty(samples.shape, dtype=np.intp)
    number = np.empty(samples.shape, dtype=np.int64)
    for index in np.unique(phase_of).tolist():
        inside = np.flatnonzero(phase_of == index)
        which[inside], number[inside] = mixture._rotations[index].at(samples[inside] - mixture.phases[index].first)
    return which, number


@dataclass(frozen=True)
class Rotation:
    """How datasets alternate in one phase."""

    before: Ids
    """Samples of each dataset before this phase."""
    slots: npt.NDArray[np.intp]
    """The dataset in each slot of the table."""
    ranks: Ids
    """How often that dataset occurs earlier in the table."""
    counts: Ids
    """How often each dataset occurs in the table."""

    def at(self, samples: Ids) -> tuple[npt.NDArray[np.intp], Ids]:
        """Return the datasets of samples of this phase, and the samples' numbers within those."""
        turn, slot = np.divmod(samples, len(self.slots))
        which = self.slots[slot]
        number = self.before[which] + turn * self.counts[which] + self.ranks[slot]
        return which, number.astype(np.int64, copy=False)

    def counts_before(self, number: int) -> list[int]:
        """Return the samples of each dataset before sample `number` of this phase."""
        turn, slot = divmod(number, len(self.slots))
        part = np.bincount(self.slots[:slot], minlength=len(self.before))
        return [int(count) for count in self.before + turn * self.counts + part]


def rotation(before: Sequence[int], shares: Sequence[Fraction]) -> Rotation:
    """Build the rotation of datasets that have had so many samples before."""
    size = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * size) for share in shares]
    slots = np.array(list(_schedule(counts)), dtype=np.intp)
    ranks = np.empty(size, dtype=np.int64)
    for index, count in enumerate(counts):
        ranks[slots == index] = np.arange(count)
    return Rotation(np.array(before, dtype=np.int64), slots, ranks, np.array(counts, dtype=np.int64))


def _schedule(counts: Sequence[int]) -> Iterator[int]:
    """Yield the dataset of each slot: of those that are released, the one with the earliest deadline."""
    size = sum(counts)
    jobs = sorted((j * size // n, -((-j - 1) * size // n), index) for index, n in enumerate(counts) for j in range(n))
    ready: list[tuple[int, int]] = []
    released = 0
    for slot in range(size):
        while released < size and jobs[released][0] <= slot:
            heapq.heappush(ready, jobs[released][1:])
            released += 1
        deadline, index = heapq.heappop(ready)
        assert deadline > slot, "earliest deadline first meets every deadline that can be met"
        yield index
