"""The open data of a recipe: one dataset or a mixture of several, with windows numbered across all of them.

Of chats, a window is a row of packed samples; of prompts for reinforcement learning, a prompt.
"""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headway.data.loader import Loader, RowReader, WindowReader
from headway.data.mixture import DataMixture, MixturePhase, samples_before, shares_of
from headway.data.order import Ids, Split, held_out, split_windows
from headway.data.packed_reader import PackedReader
from headway.data.packing import Packing, pack_dataset
from headway.data.prompts import PromptOrder, PromptReader, usable_prompts
from headway.data.shards import Dataset, check_version, open_dataset, split_dataset
from headway.data.steps import first_sample
from headway.errors import DataError, plural
from headway.recipe import Recipe
from headway.recipe.data import Data
from headway.recipe.policy import PRESETS
from headway.recipe.train import Train

SAMPLES = {
    "pretrain": ("text",),
    "sft": ("chat", "text"),
    "dpo": ("pairs",),
    "orpo": ("pairs",),
    "simpo": ("pairs",),
    "kto": ("labelled",),
    "reward": ("pairs",),
    "distill": ("chat", "text"),
    **dict.fromkeys(PRESETS, ("prompts",)),
}
"""The kinds of samples that an objective takes, by `objective.kind`; one of your own takes any but prompts."""


@dataclass(frozen=True)
class Corpus:
    """One or more open datasets; a mixture's are sorted by version, so that their names do not matter."""

    names: tuple[str, ...]
    datasets: tuple[Dataset, ...]
    splits: tuple[Split, ...]
    order: Split | DataMixture
    """What the `Loader` follows."""
    version: str
    """The dataset's version; for a mixture, a hash of its datasets' versions and shares."""
    recipe: Recipe
    packings: tuple[Packing, ...] = ()
    """The rows of each dataset of chats; empty for text."""
    usable: tuple[npt.NDArray[np.bool_], ...] = ()
    """Of each dataset of prompts, which leave room for an answer; empty for others."""

    def pinned(self) -> Data:
        """Return the recipe's data section with absolute paths and versions, so that no other data is ever used."""
        data = self.recipe.data
        if data.path is not None:
            return data.model_copy(update={"path": str(Path(data.path).resolve()), "version": self.version})
        versions = {name: dataset.version for name, dataset in zip(self.names, self.datasets, strict=True)}
        parts = {
            name: part.model_copy(update={"path": str(Path(part.path).resolve()), "version": versions[name]})
            for name, part in data.mixture.items()
        }
        return data.model_copy(update={"mixture": parts, "version": self.version})

    def train(self) -> Train:
        """Return the recipe's train section with the steps that its epochs are."""
        train = self.recipe.train
        if train.epochs is None:
            return train
        if self.usable:
            return train.with_steps(math.ceil(train.epochs * sum(self._usable_training()) / train.batch))
        samples = math.ceil(train.epochs * sum(split.training for split in self.splits))
        steps = 1
        while self.cursor_before(steps + 1) < samples:
            steps *= 2
        return train.with_steps(bisect_left(range(steps + 1), samples, lo=1, key=lambda n: self.cursor_before(n + 1)))

    def notes(self) -> list[str]:
        """Return what became of samples that are too long, and how much of the rows is padding."""
        if self.usable:
            return self._prompt_notes()
        sentences = []
        for name, packing in zip(self.names, self.packings, strict=False):
            counts, seq = packing.counts, packing.seq
            sentences.append(f"{name}: {plural(packing.rows, 'row')} of {seq:,} tokens, {packing.padding:.1%} padding")
            for count, fate in (
                (counts.dropped, f"longer than data.seq ({seq:,}) are left out"),
                (counts.truncated, f"longer than data.seq ({seq:,}) lose their end"),
                (counts.split, f"longer than data.seq ({seq:,}) are split"),
                (counts.untrained, "without a token to train on are left out"),
            ):
                if count:
                    sentences.append(f"{name}: {count:,} of {plural(counts.samples, 'sample')} {fate}")
        rows, batch = sum(split.training for split in self.splits), self.cursor_before(2)
        if self.recipe.train.epochs is not None and rows < batch:
            sentences.append(f"an epoch has {plural(rows, 'row')}, fewer than a batch ({batch:,}): steps repeat rows")
        return sentences

    def _prompt_notes(self) -> list[str]:
        recipe, sentences = self.recipe, []
        for name, split, usable in zip(self.names, self.splits, self.usable, strict=True):
            sentences.append(f"{name}: {plural(split.windows, 'prompt')}, {split.held_out:,} held out")
            if too_long := split.windows - int(usable.sum()):
                assert recipe.rl is not None, "which only policies have"
                sentences.append(
                    f"{name}: {plural(too_long, 'prompt')} of more than {recipe.data.seq - recipe.rl.max_tokens:,} "
                    f"tokens leave no room for rl.max_tokens ({recipe.rl.max_tokens:,}): left out"
                )
        training = sum(self._usable_training())
        if training < recipe.train.batch:
            sentences.append(
                f"an epoch has {plural(training, 'prompt')}, fewer than a batch ({recipe.train.batch:,}): steps repeat "
                "prompts"
            )
        return sentences

    def _usable_training(self) -> list[int]:
        """Return the prompts of each dataset that an epoch has."""
        pairs = zip(self.splits, self.usable, strict=True)
        return [int(usable.sum()) - int(usable[held_out(split)].sum()) for split, usable in pairs]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.datasets[0].manifest.vocab_size

    @property
    def weighted(self) -> bool:
        """Whether some sample's weight is not 1."""
        return bool(self.packings) and any(
            (shard["weight"] != 1).any() for dataset in self.datasets for shard in dataset.samples
        )

    def reader(self) -> RowReader:
        """Return a reader of all windows, with the masking and document numbers of the recipe."""
        if self.usable:
            raise DataError(
                "prompts are not rows to train on: answers to them are sampled first",
                hint="headway train does that; in Python, Corpus.prompt_order and prompt_reader",
            )
        data = self.recipe.data
        if self.packings:
            return PackedReader(self.datasets, self.packings, data.loss_on)
        return WindowReader(
            self.datasets, data.seq, mask_boundaries=data.mask_boundaries, documents=data.within_documents
        )

    def loader(self, reader: RowReader, rank: int = 0, ranks: int = 1) -> Loader:
        """Return the loader of one rank; ranks share each batch evenly."""
        batch = max(self.recipe.train.batches)
        rows = batch // ranks
        return Loader(reader, self.order, self.recipe.seed, batch, rows=(rows * rank, rows * (rank + 1)))

    def prompt_reader(self) -> PromptReader:
        """Return a reader of all prompts."""
        return PromptReader(*self.datasets)

    def prompt_order(self) -> PromptOrder:
        """Return which prompts the run's samples are."""
        assert self.usable, "the data is prompts"
        return PromptOrder(self.order, self.recipe.seed, np.concatenate(self.usable), self.recipe.data.skip)

    def held_out(self, windows: int) -> Ids:
        """Return at most so many held-out windows, as evenly from all datasets as possible; of prompts, usable ones."""
        if self.usable:
            kept_out = [held_out(split) for split in self.splits]
            chosen = [ids[usable[ids]] for ids, usable in zip(kept_out, self.usable, strict=True)]
            counts = _share_out(windows, [len(ids) for ids in chosen])
            chosen = [ids[:count] for ids, count in zip(chosen, counts, strict=True)]
        else:
            counts = _share_out(windows, [split.held_out for split in self.splits])
            chosen = [held_out(split, count) for split, count in zip(self.splits, counts, strict=True)]
        return np.concatenate([ids + start for ids, start in zip(chosen, self._first_windows, strict=True)])

    def by_dataset(self, ids: Ids) -> list[Ids]:
        """Group window ids by dataset, keeping their order."""
        which = np.searchsorted(self._first_windows, ids, side="right") - 1
        return [ids[which == index] for index in range(len(self.names))]

    @property
    def _first_windows(self) -> tuple[int, ...]:
        return self.order.first_windows if isinstance(self.order, DataMixture) else (0,)

    def shares(self) -> list[tuple[int, tuple[Fraction, ...]]]:
        """Return (first step, share of each dataset) per phase."""
        if not isinstance(self.order, DataMixture):
            return [(1, (Fraction(1),))]
        return list(zip(self.recipe.data.changes, (phase.shares for phase in self.order.phases), strict=True))

    def samples(self, cursor: int) -> list[int]:
        """Return how many of the run's first `cursor` samples come from each dataset."""
        return samples_before(self.order, cursor) if isinstance(self.order, DataMixture) else [cursor]

    def epochs(self, cursor: int) -> list[float]:
        """Return the epochs of each dataset after `cursor` samples."""
        return [count / split.training for count, split in zip(self.samples(cursor), self.splits, strict=True)]

    def cursor_before(self, step: int) -> int:
        """Return the cursor at which a step begins; of prompts, if none is left out and none sampled besides."""
        train = self.recipe.train
        return first_sample(step, ((1, train.batch), *train.batch_ramp), self.recipe.data.skip)


def _share_out(total: int, most: Sequence[int]) -> list[int]:
    """Divide a total as evenly as possible, with no share above its maximum."""
    shares = [0] * len(most)
    for done, index in enumerate(sorted(range(len(most)), key=lambda i: most[i])):
        shares[index] = min(most[index], -(-total // (len(most) - done)))
        total -= shares[index]
    return shares


def open_corpus(recipe: Recipe) -> Corpus:
    """Open and check the data of a recipe; raise DataError naming the dataset that is wrong."""
    data = recipe.data
    by_name = {name: open_dataset(Path(part.path)) for name, part in data.parts.items()}
    for name, part in data.parts.items():
        check_version(by_name[name], part.version)
    _check_distinct(by_name)
    _check_tokenizers(by_name)
    names = tuple(sorted(by_name, key=lambda name: by_name[name].version))
    datasets = tuple(by_name[name] for name in names)
    kind = _check_kinds(by_name, names, recipe)
    usable = usable_prompts(dict(zip(names, datasets, strict=True)), recipe) if kind == "prompts" else ()
    packings = tuple(pack_dataset(dataset, data) for dataset in datasets) if kind not in ("text", "prompts") else ()
    if usable:
        splits = tuple(
            split_windows(len(known), data.holdout, d.version) for known, d in zip(usable, datasets, strict=True)
        )
    elif packings:
        splits = tuple(packing.split(by_name[name].version) for name, packing in zip(names, packings, strict=True))
    else:
        splits = tuple(_split(name, by_name[name], data) for name in names)
    if data.path is not None:
        return Corpus(names, datasets, splits, splits[0], datasets[0].version, recipe, packings, usable)
    return _mix(recipe, names, datasets, splits, packings, usable)


def _check_kind(objective: str, name: str, kind: str) -> None:
    """Raise DataError if an objective needs samples of another kind."""
    needed = SAMPLES.get(objective)
    if kind in needed if needed is not None else kind != "prompts":
        return
    if kind == "prompts":
        other = needed[0] if needed else "text"
        raise DataError(
            f"objective {objective} needs data of kind {other}, but {name} is of kind prompts",
            hint="prompts are for reinforcement learning: --set objective.kind=grpo --set 'rl.rewards=[\"math\"]'",
        )
    assert needed is not None, "or any kind but prompts"
    if needed == ("prompts",):
        raise DataError(
            f"objective {objective} needs data of kind prompts, but {name} is of kind {kind}",
            hint="build prompts: headway data build OUT SOURCES --chat MODEL --prompts",
        )
    others = [other for other, kinds in SAMPLES.items() if kind in kinds]
    raise DataError(
        f"objective {objective} needs data of kind {needed[0]}, but {name} is of kind {kind}",
        hint=f"--set objective.kind={others[0]}, or build {needed[0]} data: docs/guides/chat-data.md",
    )


def _check_kinds(datasets: Mapping[str, Dataset], names: Sequence[str], recipe: Recipe) -> str:
    """Return the kind of all datasets; raise DataError if it is not one that the recipe can train on."""
    kinds = {name: datasets[name].kind for name in names}
    first = names[0]
    other = next((name for name in names if kinds[name] != kinds[first]), None)
    if other is not None:
        raise DataError(
            f"{first} is {kinds[first]} and {other} is {kinds[other]}",
            hint="mix datasets of one kind, or train in turn",
        )
    _check_kind(recipe.objective.kind, first, kinds[first])
    if kinds[first] != "text" and not recipe.data.within_documents:
        raise DataError(
            "data.within_documents is false, but samples of chat never attend to each other", hint="leave it out"
        )
    return kinds[first]


def _mix(
    recipe: Recipe,
    names: tuple[str, ...],
    datasets: tuple[Dataset, ...],
    splits: tuple[Split, ...],
    packings: tuple[Packing, ...],
    usable: tuple[npt.NDArray[np.bool_], ...],
) -> Corpus:
    """Mix open datasets in the shares of the recipe."""
    data, train = recipe.data, recipe.train
    parts = [data.mixture[name] for name in names]
    changes = {step: shares_of([part.weight_at(step) for part in parts]) for step in data.changes}
    version = _version([dataset.version for dataset in datasets], changes)
    if data.version is not None and not (len(data.version) >= 8 and version.startswith(data.version)):
        raise DataError(
            f"recipe wants data version {data.version}, its mixture is {version}",
            hint="it follows from versions and weights: remove data.version, or change weights with train --from",
        )
    batches = ((1, train.batch), *train.batch_ramp)
    starts = [0 if step == 1 else first_sample(step, batches, data.skip) for step in changes]
    phases = tuple(MixturePhase(start, shares) for start, shares in zip(starts, changes.values(), strict=True))
    return Corpus(names, datasets, splits, DataMixture(splits, phases, version), version, recipe, packings, usable)


def _version(versions: Sequence[str], changes: Mapping[int, Sequence[Fraction]]) -> str:
    """Return the first 16 hex digits of a hash of the datasets' versions and of their shares from each step on."""
    content = ["headway-mixture-1", versions, [[step, [str(share) for share in changes[step]]] for step in changes]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _split(name: str, dataset: Dataset, data: Data) -> Split:
    try:
        return split_dataset(dataset, data.seq, data.holdout)
    except DataError as error:
        if data.path is not None:
            raise
        raise DataError(f"dataset {name}: {error.message}", hint=error.hint) from None


def _check_distinct(datasets: Mapping[str, Dataset]) -> None:
    names: dict[str, str] = {}
    for name, dataset in datasets.items():
        other = names.setdefault(dataset.version, name)
        if other != name:
            raise DataError(
                f"{other} and {name} are the same data, version {dataset.version}",
                hint="list it once; a higher weight gives it a larger share",
            )


def _check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Raise DataError if token ids do not mean the same in all datasets."""
    (first, base), *others = datasets.items()
    for name, dataset in others:
        expected, manifest = base.manifest, dataset.manifest
        if (expected.tokenizer.sha256, expected.end_of_text) != (manifest.tokenizer.sha256, manifest.end_of_text):
            raise DataError(
                f"{first} and {name} were built with different tokenizers",
                hint=f"build {name} again with --tokenizer {base.path}",
            )
