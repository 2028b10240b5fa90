"""The data of a recipe, open: one data set or a mixture of several, behind one numbering of windows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from headway.data.loader import Loader, WindowReader
from headway.data.mixture import DataMixture, MixturePhase, samples_before, shares_of
from headway.data.order import Ids, Split, held_out
from headway.data.shards import Dataset, check_version, open_dataset, split_dataset
from headway.data.steps import first_sample
from headway.errors import DataError
from headway.recipe import Recipe
from headway.recipe.data import Data

__all__ = ["Corpus", "open_corpus"]


@dataclass(frozen=True)
class Corpus:
    """One or more open data sets. A mixture's are sorted by version: what it is does not depend on their names."""

    names: tuple[str, ...]
    datasets: tuple[Dataset, ...]
    splits: tuple[Split, ...]
    order: Split | DataMixture
    """What `Loader` goes by."""
    version: str
    """The data set's own; that of a mixture is a hash of its data sets' versions and shares."""
    recipe: Recipe

    def pinned(self) -> Data:
        """The recipe's data section with whole paths and versions, so that no other data is ever taken for it."""
        data = self.recipe.data
        if data.path is not None:
            return data.model_copy(update={"path": str(Path(data.path).resolve()), "version": self.version})
        parts = {
            name: part.model_copy(update={"path": str(Path(part.path).resolve()), "version": self._of(name).version})
            for name, part in data.mixture.items()
        }
        return data.model_copy(update={"mixture": parts, "version": self.version})

    def _of(self, name: str) -> Dataset:
        return self.datasets[self.names.index(name)]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.datasets[0].manifest.vocab_size

    def reader(self) -> WindowReader:
        """Reads windows of all data sets, as the recipe wants them masked and numbered."""
        data = self.recipe.data
        return WindowReader(
            self.datasets, data.seq, mask_boundaries=data.mask_boundaries, documents=data.within_documents
        )

    def loader(self, reader: WindowReader, rank: int = 0, ranks: int = 1) -> Loader:
        """The batches of the recipe's run, as one of some ranks sees them that share each batch evenly."""
        batch = max(self.recipe.train.batches)
        rows = batch // ranks
        return Loader(reader, self.order, self.recipe.seed, batch, rows=(rows * rank, rows * (rank + 1)))

    def held_out(self, windows: int) -> Ids:
        """Windows to evaluate on, at most so many in all: as many of each data set, as far as there are."""
        counts = _share_out(windows, [split.held_out for split in self.splits])
        aside = (held_out(split, count) for split, count in zip(self.splits, counts, strict=True))
        return np.concatenate([ids + start for ids, start in zip(aside, self._first_windows, strict=True)])

    def by_dataset(self, ids: Ids) -> list[Ids]:
        """Those of some windows that are of each data set, in their order."""
        which = np.searchsorted(self._first_windows, ids, side="right") - 1
        return [ids[which == index] for index in range(len(self.names))]

    @property
    def _first_windows(self) -> tuple[int, ...]:
        return self.order.first_windows if isinstance(self.order, DataMixture) else (0,)

    def shares(self) -> list[tuple[int, tuple[Fraction, ...]]]:
        """(step, share of each data set): from which step on they hold."""
        if not isinstance(self.order, DataMixture):
            return [(1, (Fraction(1),))]
        return list(zip(self.recipe.data.changes, (phase.shares for phase in self.order.phases), strict=True))

    def samples(self, cursor: int) -> list[int]:
        """How many of the run's first samples are of each data set."""
        return samples_before(self.order, cursor) if isinstance(self.order, DataMixture) else [cursor]

    def epochs(self, cursor: int) -> list[float]:
        """How often each data set has been gone through when the run has seen so many samples."""
        return [count / split.training for count, split in zip(self.samples(cursor), self.splits, strict=True)]

    def cursor_before(self, step: int) -> int:
        """The number of the sample that a step begins with."""
        train = self.recipe.train
        return first_sample(step, ((1, train.batch), *train.batch_ramp), self.recipe.data.skip)


def _share_out(total: int, most: Sequence[int]) -> list[int]:
    """As even shares of a total as can be had when nobody gets more than there is."""
    shares = [0] * len(most)
    for place, index in enumerate(sorted(range(len(most)), key=lambda i: most[i])):
        shares[index] = min(most[index], -(-total // (len(most) - place)))
        total -= shares[index]
    return shares


def open_corpus(recipe: Recipe) -> Corpus:
    """Open and check the data of a recipe; DataError says what is wrong with which data set."""
    data = recipe.data
    found = {name: open_dataset(Path(part.path)) for name, part in data.parts.items()}
    for name, part in data.parts.items():
        check_version(found[name], part.version)
    _check_distinct(found)
    _check_tokenizers(found)
    names = tuple(sorted(found, key=lambda name: found[name].version))
    datasets = tuple(found[name] for name in names)
    splits = tuple(_split(name, found[name], data) for name in names)
    if data.path is not None:
        return Corpus(names, datasets, splits, splits[0], datasets[0].version, recipe)
    return _mix(recipe, names, datasets, splits)


def _mix(recipe: Recipe, names: tuple[str, ...], datasets: tuple[Dataset, ...], splits: tuple[Split, ...]) -> Corpus:
    """Put open data sets into the shares that the recipe says."""
    data, train = recipe.data, recipe.train
    parts = [data.mixture[name] for name in names]
    changes = {step: shares_of([part.weight_at(step) for part in parts]) for step in data.changes}
    version = _version([dataset.version for dataset in datasets], changes)
    if data.version is not None and not (len(data.version) >= 8 and version.startswith(data.version)):
        raise DataError(
            f"recipe wants data version {data.version}, its mixture is {version}",
            hint="versions and weights make it; leave data.version out, or to go on with other weights: train --from",
        )
    batches = ((1, train.batch), *train.batch_ramp)
    starts = [0 if step == 1 else first_sample(step, batches, data.skip) for step in changes]
    phases = tuple(MixturePhase(start, shares) for start, shares in zip(starts, changes.values(), strict=True))
    return Corpus(names, datasets, splits, DataMixture(splits, phases, version), version, recipe)


def _version(versions: Sequence[str], changes: Mapping[int, Sequence[Fraction]]) -> str:
    """The first 16 hex digits of a hash of data sets' versions, and of their shares from which step on."""
    said = ["headway-mixture-1", versions, [[step, [str(share) for share in changes[step]]] for step in changes]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _split(name: str, dataset: Dataset, data: Data) -> Split:
    try:
        return split_dataset(dataset, data.seq, data.holdout)
    except DataError as error:
        if data.path is not None:
            raise
        raise DataError(f"data set {name}: {error.message}", hint=error.hint) from None


def _check_distinct(found: Mapping[str, Dataset]) -> None:
    seen: dict[str, str] = {}
    for name, dataset in found.items():
        other = seen.setdefault(dataset.version, name)
        if other != name:
            raise DataError(
                f"{other} and {name} are the same data, version {dataset.version}",
                hint="name it once: a higher weight gives it a larger share",
            )


def _check_tokenizers(found: Mapping[str, Dataset]) -> None:
    """Ids must mean the same in all data sets."""
    (first, base), *others = found.items()
    for name, dataset in others:
        mine, its = base.manifest, dataset.manifest
        if (mine.tokenizer.sha256, mine.end_of_text) != (its.tokenizer.sha256, its.end_of_text):
            raise DataError(
                f"{first} and {name} were built with different tokenizers",
                hint=f"build {name} again with --tokenizer {base.path}",
            )
