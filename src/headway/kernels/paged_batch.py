"""What paged attention must know of a pass: whose tokens it brings, and where their keys and values lie.

Shapes, besides those of `models/`: T tokens of the pass, S sequences, P pages, Z tokens of a page, A all tokens that a
sequence keeps.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.kernels.batch_invariant_attention import TilePlan, plan_tiles
from headway.kernels.even_attention import TileList, share_out
from headway.kernels.pointer_table import uploaded

FRESH_TOKENS = 1024
"""Length from which prompts have attention of their own, without pages. The library plans for each shape anew, which
takes longer than it saves for shorter ones of many lengths."""


@dataclass(frozen=True)
class PagedBatch:
    """Which sequences the tokens of a pass belong to, and where these keep their keys and values."""

    starts: tuple[int, ...]
    """Of each sequence: its first token in the pass; at the end, T."""
    lengths: tuple[int, ...]
    """Of each sequence: its tokens in the cache, those of the pass included."""
    starts_S1: Tensor
    """`starts` on the device, int32."""
    lengths_S: Tensor
    """`lengths` on the device, int32."""
    tables_SP: Tensor
    """Pages of each sequence in order, int32; whatever is beyond its length is not read."""
    slots_T: Tensor
    """Where each token's key and value go: page * Z + place in it, int64."""
    _programs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _plans: dict[int, TilePlan] = field(default_factory=dict)
    _lists: dict[tuple[int, int, int], TileList] = field(default_factory=dict)
    _spans: "dict[tuple[int, ...], KeySpan]" = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Whether all sequences begin with this pass, with as many tokens each, and long: it has all their keys."""
        return (
            len(set(self.lengths)) == 1 and len(self.slots_T) == sum(self.lengths) and self.lengths[0] >= FRESH_TOKENS
        )

    def tiles(self, share: int, page: int) -> TilePlan:
        """Return the plan of batch-invariant attention, with so many query heads per key head; made once per pass."""
        if share not in self._plans:
            starts, lengths = np.array(self.starts), np.array(self.lengths)
            places_A = np.arange(lengths.max())
            slots_SA = self.tables_SP.cpu().numpy().astype(np.int64)[:, places_A // page] * page + places_A % page
            self._plans[share] = plan_tiles(starts[:-1], np.diff(starts), lengths, slots_SA, share)
        return self._plans[share]

    @property
    def decodes(self) -> bool:
        """Whether all sequences have one token in this pass."""
        return len(self.slots_T) == len(self.lengths)

    def tile_list(self, pages: int, page: int, runs: int, *, exact: bool = False, early: bool = False) -> TileList:
        """Return the tiles of keys of sequences that decode, in so many runs; made once per pass."""
        key = pages, page, runs
        if key not in self._lists:
            self._lists[key] = share_out(self.lengths_S, self.tables_SP, *key, exact=exact, early=early)
        return self._lists[key]

    def programs(self, queries: int) -> tuple[Tensor, Tensor]:
        """Return the sequence and the first query of each program that has so many queries; made once per pass."""
        if queries not in self._programs and self.decodes:
            numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.slots_T.device)
            self._programs[queries] = numbers, torch.zeros_like(numbers)
        if queries not in self._programs:
            spans = list(enumerate(zip(self.starts, self.starts[1:], strict=False)))
            pairs = [(i, first) for i, (start, end) in spans for first in range(0, end - start, queries)]
            numbers = uploaded(np.array(pairs, dtype=np.int32).T.copy(), self.slots_T.device)
            self._programs[queries] = numbers[0], numbers[1]
        return self._programs[queries]


@dataclass(frozen=True)
class KeySpan:
    """What some sequences of a pass, with equally many queries each, attend to; the same in all layers."""

    pages: Tensor
    """Pages of all sequences, one after another, as many of each."""
    hidden_SMA: Tensor
    """Added to the scores: 0 where a query attends, else minus infinity."""
