"""Resharding plans: the fewest slice copies that turn one layout of a tensor into another. Pure.

Saving, loading, resizing, replicating to a peer and pushing weights to inference differ in their holders and
transports; which bytes go where is decided here.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.state.box import Box
from headway.state.layout import BoxIndex, Layout

_IDLE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Move:
    """Copy this region from the source's part to the target's; a holder may be both."""

    source: int
    target: int
    box: Box


def moves(src: Layout, dst: Layout, busy: Mapping[int, int] = _IDLE) -> list[Move]:
    """Plan the copies that fill every part of `dst` from parts of `src`, each element of each part once.

    There is one move per overlapping pair of a part of `dst` and a distinct box of `src`, in the order of `dst` and by
    position. A holder that has the region is its own source. Otherwise the source is the copy with the fewest elements
    to send so far, counting `busy` and earlier moves, or the lowest holder among equals. `dst` may be a few parts of a
    layout only: those that one rank reads.
    """
    assert src.shape == dst.shape, f"a tensor of shape {src.shape} cannot become one of shape {dst.shape}"
    copies: dict[Box, list[int]] = {}
    for part in src.parts:
        copies.setdefault(part.box, []).append(part.holder)
    own = {part.holder: part.box for part in src.parts}
    index = BoxIndex(copies)
    overlaps: dict[Box, list[tuple[Box, Box]]] = {}
    # A holder has one box, so it is in one queue only.
    queues: dict[Box, list[tuple[int, int]]] = {}
    planned = []
    for part in dst.parts:
        if part.box not in overlaps:
            overlaps[part.box] = _sources(index, part.box)
        for box, common in overlaps[part.box]:
            if own.get(part.holder) == box:
                source = part.holder
            else:
                if box not in queues:
                    queues[box] = sorted((busy.get(holder, 0), holder) for holder in copies[box])
                sent, source = queues[box][0]
                heapq.heapreplace(queues[box], (sent + common.volume, source))
            planned.append(Move(source, part.holder, common))
    return planned


def all_moves(src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> dict[str, list[Move]]:
    """Plan the moves of every tensor in `dst`; copies share the sending of all of them."""
    # The largest first: small tensors then balance what the large ones left uneven.
    largest_first = sorted(dst, key=lambda name: math.prod(dst[name].shape), reverse=True)
    busy: Counter[int] = Counter()
    planned = {}
    for name in largest_first:
        planned[name] = moves(src[name], dst[name], busy)
        for move in planned[name]:
            if move.source != move.target:
                busy[move.source] += move.box.volume
    return {name: planned[name] for name in dst}


def _sources(index: BoxIndex, box: Box) -> list[tuple[Box, Box]]:
    """Return the boxes that cover this one, each with the intersection, by position."""
    sources = sorted(index.find(box), key=lambda pair: pair[1].start)
    covered = sum(common.volume for _, common in sources)
    assert covered == box.volume, f"the sources have {covered} of the {box.volume} elements at {box.start}: no layout"
    return sources
