"""Prompts for reinforcement learning: read one by its number, and the order in which a run samples answers to them.

The order is that of all data (`headway.data.order`): sample n of a run is prompt number `order_at(n)`, and the cursor
counts samples. Prompts that leave no room for an answer keep their places in the order and are passed over, so that
the order does not depend on `data.seq` and `rl.max_tokens`, and the cursor alone says which prompts are next.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.mixture import DataMixture, mixed_order_at
from headway.data.order import Ids, Split, after_skips, held_out, order_at, split_windows
from headway.data.shards import Dataset
from headway.errors import DamagedData, DataError, plural
from headway.recipe import Recipe

_LOOKAHEAD = 32
"""Samples that are looked up besides those asked for, in case some are passed over."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    number: int
    """In the dataset; of a mixture, across all its datasets."""
    ids: tuple[int, ...]
    """As the chat template renders it, with the generation prompt."""
    text: str
    """What the user asked, or all messages as JSON: for people."""
    fields: Mapping[str, Any]
    """The row's other fields, for rewards and environments."""


class PromptReader:
    """Reads prompts of one or more datasets, numbered consecutively; nothing is in memory but what is mapped."""

    def __init__(self, *datasets: Dataset) -> None:
        other = next((dataset for dataset in datasets if dataset.kind != "prompts"), None)
        if other is not None:
            raise DataError(
                f"{other.path} holds {other.kind}, not prompts",
                hint="build them with headway data build --chat MODEL --prompts",
            )
        self._datasets = datasets
        self._first = [0, *accumulate(dataset.manifest.documents for dataset in datasets)]

    def __len__(self) -> int:
        return self._first[-1]

    def prompt(self, number: int) -> Prompt:
        """Return a prompt."""
        if not 0 <= number < len(self):
            raise DataError(f"there is no prompt {number}", hint=f"0 to {len(self) - 1}")
        which = int(np.searchsorted(self._first, number, side="right")) - 1
        dataset, within = self._datasets[which], number - self._first[which]
        text, fields = _text_and_fields(dataset, within)
        return Prompt(number, tuple(dataset.document(within).ids.tolist()), text, fields)

    @functools.cached_property
    def lengths(self) -> Ids:
        """Tokens of each prompt."""
        ends = [table[:, 0].astype(np.int64) for dataset in self._datasets for table in dataset.documents]
        return np.concatenate([np.diff(shard, prepend=0) for shard in ends])


def _text_and_fields(dataset: Dataset, number: int) -> tuple[str, dict[str, Any]]:
    """Return what is stored beside a prompt's tokens."""
    shard = 0
    while number >= len(dataset.fields[shard][1]):
        number -= len(dataset.fields[shard][1])
        shard += 1
    lines, ends = dataset.fields[shard]
    start, end = int(ends[number - 1]) if number else 0, int(ends[number])
    try:
        content = json.loads(lines[start:end].tobytes())
        text, fields = content["text"], content["fields"]
    except (ValueError, KeyError, TypeError):
        raise DamagedData(
            f"{dataset.path}: the fields of prompt {number} in shard {shard} are damaged",
            hint="copy the dataset again, or rebuild it with --force",
        ) from None
    return text, fields


def usable_prompts(datasets: Mapping[str, Dataset], recipe: Recipe) -> tuple[npt.NDArray[np.bool_], ...]:
    """Return of each dataset which prompts leave room for an answer, `rl.max_tokens` in `data.seq`.

    Raise DataError if a dataset has none to train on, or if it has a longer one and the recipe says to stop then.
    """
    rl, data = recipe.rl, recipe.data
    assert rl is not None, "which policies have"
    most = data.seq - rl.max_tokens
    masks = []
    for name, dataset in datasets.items():
        lengths = PromptReader(dataset).lengths
        usable = lengths <= most
        too_long = len(lengths) - int(usable.sum())
        if too_long and rl.if_prompt_long == "stop":
            raise DataError(
                f"{name}: {plural(too_long, 'prompt')} of more than {most:,} tokens leave no room for rl.max_tokens "
                f"({rl.max_tokens:,})",
                hint=f"set data.seq to {int(lengths.max()) + rl.max_tokens}, or rl.if_prompt_long=leave-out",
            )
        split = split_windows(len(lengths), data.holdout, dataset.version)
        if int(usable.sum()) == int(usable[held_out(split)].sum()):
            raise DataError(
                f"{name}: no prompt to train on leaves room for rl.max_tokens ({rl.max_tokens:,}) in data.seq "
                f"({data.seq:,})",
                hint=f"set data.seq to {int(lengths.max()) + rl.max_tokens}, or rl.max_tokens to less",
            )
        masks.append(usable)
    return tuple(masks)


class Draw(NamedTuple):
    """The next samples of a run."""

    samples: tuple[int, ...]
    """Their numbers in the run, ascending."""
    prompts: tuple[int, ...]
    """The number of each one's prompt."""
    cursor: int
    """Where the next draw begins."""


@dataclass(frozen=True)
class PromptOrder:
    """Which prompts a run's samples are: a pure function of the data, the seed and the cursor.

    However many are drawn at once, all draws together are the same samples: every usable training prompt once per
    epoch.
    """

    order: Split | DataMixture
    seed: int
    usable: npt.NDArray[np.bool_]
    """Of each prompt, whether it leaves room for an answer; of each dataset, some training prompt does."""
    skips: Sequence[tuple[int, int]] = ()
    """Ranges of samples that a recipe skips (`data.skip`): exactly these, whatever the batch is."""

    def next(self, cursor: int, count: int) -> Draw:
        """Return the first `count` samples from the cursor on whose prompts are usable."""
        samples: list[int] = []
        prompts: list[int] = []
        while len(samples) < count:
            cursor = after_skips(cursor, 1, self.skips)
            end = min([first for first, _ in self.skips if first > cursor], default=None)
            size = count - len(samples) + _LOOKAHEAD
            offsets = np.arange(size if end is None else min(size, end - cursor), dtype=np.int64)
            numbers = self._numbers(cursor, offsets)
            chosen = np.flatnonzero(self.usable[numbers])[: count - len(samples)]
            samples += (cursor + chosen).tolist()
            prompts += numbers[chosen].tolist()
            cursor = samples[-1] + 1 if len(samples) == count else cursor + len(offsets)
        return Draw(tuple(samples), tuple(prompts), cursor)

    def _numbers(self, first: int, offsets: Ids) -> Ids:
        if isinstance(self.order, DataMixture):
            return mixed_order_at(self.order, self.seed, first, offsets)
        return order_at(self.order, self.seed, first, offsets)
