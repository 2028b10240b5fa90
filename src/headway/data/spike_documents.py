"""The documents behind loss spikes: those of a spike's batch, and which of them is unlike the documents around it.

A loss is the surprise of a batch, so that a spike's batch mostly has text unlike the rest: broken encodings, logs,
tables of numbers. How unlike is measured without a model: the mean surprise of a part's tokens, in bits, given how
often each token occurs in the batches around. The evidence beside it is in how many spikes' batches a document is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.corpus import open_corpus
from headway.data.explain import Explainer, SeenDocument
from headway.errors import HeadwayError, plural
from headway.recipe import Recipe
from headway.track.insights import Insight

AROUND = 16
"""Batches before a spike, and as many after it, that its own is compared with."""
AROUND_TOKENS = 1 << 20
"""Tokens of them that are read at most, and of a spike's batch."""
SHORTEST = 16
"""Tokens of a part whose surprise is compared: that of a few tokens is chance."""
FEWEST = 8
"""Parts that a part must be compared with."""
SPREADS = 5.0
"""A part stands out that is so many spreads above the mean of those around, and above each of them."""
NAMED = 3

_Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SuspectDocument:
    """A part of a document in a spike's batch."""

    part: SeenDocument
    bits: float | None
    """Mean surprise of its tokens; None if they are too few, or there is nothing to compare them with."""
    stands_out: bool
    spikes: int
    """Spikes whose batches have this document."""


@dataclass(frozen=True)
class SpikeDocuments:
    """The documents of a spike's batch, the most surprising one first."""

    step: int
    documents: tuple[SuspectDocument, ...]
    around: tuple[float, float] | None
    """Mean and largest surprise of the documents in the batches around; None if they are too few."""

    @property
    def outstanding(self) -> tuple[SuspectDocument, ...]:
        """Those that are unlike the documents around."""
        return tuple(document for document in self.documents if document.stands_out)


def name_documents(insights: Sequence[Insight], recipe: Recipe) -> list[Insight]:
    """Return insights with the documents behind each loss spike in text and evidence, as far as the data has them."""
    steps = [insight.step for insight in insights if insight.kind == "loss spike" and insight.step is not None]
    if not steps:
        return list(insights)
    try:
        spikes = {spike.step: spike for spike in documents_behind(Explainer(open_corpus(recipe)), steps)}
    except (HeadwayError, OSError) as error:  # the data is gone, or the samples were no documents
        why = f"the documents behind it are not known: {error}"
        return [replace(each, text=f"{each.text}; {why}") if each.step in steps else each for each in insights]
    return [
        _named(each, spikes[each.step], len(steps)) if each.kind == "loss spike" and each.step in spikes else each
        for each in insights
    ]


def documents_behind(explainer: Explainer, steps: Sequence[int]) -> list[SpikeDocuments]:
    """Return the documents of some steps' batches, with what distinguishes them."""
    batches = {step: explainer.step(step) for step in steps}
    spikes: dict[tuple[str, int], int] = {}
    for parts in batches.values():
        for key in {(part.dataset, part.document) for part in parts}:
            spikes[key] = spikes.get(key, 0) + 1
    return [_behind(explainer, step, parts, steps, spikes) for step, parts in batches.items()]


def _behind(
    explainer: Explainer,
    step: int,
    parts: Sequence[SeenDocument],
    excluded: Sequence[int],
    spikes: dict[tuple[str, int], int],
) -> SpikeDocuments:
    batch_documents = {(part.dataset, part.document) for part in parts}
    near = (part for part in _around(explainer, step, excluded) if (part.dataset, part.document) not in batch_documents)
    around = [ids for ids in _within(explainer, near) if len(ids) >= SHORTEST]
    own: list[_Ids | None] = list(_within(explainer, parts))
    own += [None] * (len(parts) - len(own))
    rarity = _Rarity(around)
    usual = np.array([rarity.bits(ids, counted=True) for ids in around])
    known = len(usual) >= FEWEST
    mean, spread, highest = map(float, (usual.mean(), usual.std(), usual.max())) if known else (0.0, 0.0, 0.0)
    documents = []
    for part, ids in zip(parts, own, strict=True):
        bits = rarity.bits(ids) if known and ids is not None and len(ids) >= SHORTEST else None
        stands_out = bits is not None and bits > max(highest, mean + SPREADS * spread)
        documents.append(SuspectDocument(part, bits, stands_out, spikes[part.dataset, part.document]))
    documents.sort(key=lambda document: -math.inf if document.bits is None else document.bits, reverse=True)
    return SpikeDocuments(step, tuple(documents), (mean, highest) if known else None)


def _around(explainer: Explainer, step: int, excluded: Sequence[int]) -> Iterator[SeenDocument]:
    """Yield the parts of the batches around a step, the nearest first."""
    last = explainer.corpus.recipe.train.steps
    near = (other for distance in range(1, AROUND + 1) for other in (step - distance, step + distance))
    for other in near:
        if 1 <= other <= last and other not in excluded:
            yield from explainer.step(other)


def _within(explainer: Explainer, parts: Iterable[SeenDocument]) -> Iterator[_Ids]:
    """Yield the tokens of parts, until they are many."""
    datasets = dict(zip(explainer.corpus.names, explainer.corpus.datasets, strict=True))
    left = AROUND_TOKENS
    for part in parts:
        if left <= 0:
            return
        ids = datasets[part.dataset].document(part.document).ids[part.first : part.end]
        left -= len(ids)
        yield ids


class _Rarity:
    """How surprising tokens are, by how often each occurs in some texts."""

    def __init__(self, texts: Sequence[_Ids]) -> None:
        joined = np.concatenate([np.empty(0, np.int64), *texts]).astype(np.int64)
        self._counts = np.bincount(joined, minlength=1)
        self._total = len(joined)

    def bits(self, ids: _Ids, *, counted: bool = False) -> float:
        """Return the mean surprise of a text; one that was `counted` is left out of the counts."""
        own, times = np.unique(np.asarray(ids, np.int64), return_counts=True)
        counts = np.zeros(len(own), np.int64)
        inside = own < len(self._counts)
        counts[inside] = self._counts[own[inside]]
        total = self._total
        if counted:
            counts, total = counts - times, total - len(ids)
        # One occurrence more of each token, so that a new one is a surprise, not an infinite one.
        surprise = np.log2((total + len(self._counts) + 1) / (counts + 1))
        return float(surprise @ times / len(ids))


def _named(insight: Insight, spike: SpikeDocuments, spikes: int) -> Insight:
    outstanding = spike.outstanding
    if outstanding and spike.around is not None:
        first = outstanding[0]
        recurs = f"; in {first.spikes} of {spikes} spikes" if spikes > 1 else ""
        others = {_source(document.part): None for document in outstanding[1:]}
        others.pop(_source(first.part), None)
        more = f"; also {', '.join([*others][: NAMED - 1])}" if others else ""
        what = (
            f"{_source(first.part)} stands out: {first.bits:.1f} bits per token, "
            f"others around {spike.around[0]:.1f}, at most {spike.around[1]:.1f}{recurs}{more}"
        )
    else:
        sources = list(dict.fromkeys(_source(document.part) for document in spike.documents))
        shown = ", ".join(sources[:NAMED]) + (f" and {len(sources) - NAMED:,} more" if len(sources) > NAMED else "")
        what = f"trained on {plural(len(sources), 'document')}, none unlike those around: {shown}"
    evidence = {"documents": [_facts(document) for document in spike.documents], "bits_around": spike.around}
    return replace(insight, text=f"{insight.text}; {what}", evidence={**insight.evidence, **evidence})


def _source(part: SeenDocument) -> str:
    return f"document {part.document:,} of {part.dataset}" if part.origin is None else str(part.origin)


def _facts(document: SuspectDocument) -> dict[str, Any]:
    part = document.part
    return {
        "row": part.row,
        "dataset": part.dataset,
        "document": part.document,
        "first": part.first,
        "end": part.end,
        "source": None if part.origin is None else str(part.origin),
        "bits": document.bits,
        "stands_out": document.stands_out,
        "spikes": document.spikes,
    }
