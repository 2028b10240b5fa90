"""Moves: the fewest slice copies that turn one layout of a tensor into another. Pure.

Saving, loading, resizing, copying to a peer and pushing weights to inference differ in who the holders are and in what
carries the bytes; which bytes go where is decided here.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway.state.box import Box
from headway.state.layout import BoxIndex, Layout

__all__ = ["Move", "all_moves", "moves"]

_IDLE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Move:
    """Copy this region of a tensor from the source's part to the target's; a holder may be both."""

    source: int
    target: int
    box: Box


def moves(src: Layout, dst: Layout, busy: Mapping[int, int] = _IDLE) -> list[Move]:
    """The copies that fill every part of `dst` from parts of `src`, each element of each part once.

    There is one for each part of `dst` and distinct box of `src` that overlap, in the order of `dst` and by position.
    Who has the region already is its own source. Otherwise it comes from the copy that is to send the fewest elements
    so far, `busy` and the moves before it counted, or from the lowest holder among equals. `dst` may be a few parts
    of a layout only: what one rank has to read.
    """
    assert src.shape == dst.shape, f"a tensor of shape {src.shape} cannot become one of shape {dst.shape}"
    copies: dict[Box, list[int]] = {}
    for part in src.parts:
        copies.setdefault(part.box, []).append(part.holder)
    own = {part.holder: part.box for part in src.parts}
    index = BoxIndex(copies)
    overlaps: dict[Box, list[tuple[Box, Box]]] = {}
    # A holder has one box, so what one queue counts changes in no other.
    queues: dict[Box, list[tuple[int, int]]] = {}
    found = []
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
            found.append(Move(source, part.holder, common))
    return found


def all_moves(src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> dict[str, list[Move]]:
    """The moves of every tensor that `dst` names; copies share the sending of all of them together."""
    # The largest first: the small ones then even out what the large ones left uneven.
    largest_first = sorted(dst, key=lambda name: math.prod(dst[name].shape), reverse=True)
    busy: Counter[int] = Counter()
    found = {}
    for name in largest_first:
        found[name] = moves(src[name], dst[name], busy)
        for move in found[name]:
            if move.source != move.target:  # what stays where it is is not sent
                busy[move.source] += move.box.volume
    return {name: found[name] for name in dst}


def _sources(index: BoxIndex, box: Box) -> list[tuple[Box, Box]]:
    """The boxes that have elements of this one, each with the region that they share: all of it, by position."""
    found = sorted(index.find(box), key=lambda pair: pair[1].start)
    covered = sum(common.volume for _, common in found)
    assert covered == box.volume, f"the sources have {covered} of the {box.volume} elements at {box.start}: no layout"
    return found
