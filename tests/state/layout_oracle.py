"""What makes a layout valid: an oracle for tests, which construct layouts by hand."""

import math

from headway.state.box import Box
from headway.state.layout import BoxIndex, Layout


def layout_fault(layout: Layout) -> str | None:
    """Return why these parts are not a valid layout, or None if they are; construction does not check this."""
    holders: set[int] = set()
    first: dict[Box, int] = {}
    for holder, box in ((part.holder, part.box) for part in layout.parts):
        if holder in holders:
            return f"holder {holder} appears twice"
        if not box.inside(layout.shape):
            return f"the part of holder {holder}, at {box.start} of shape {box.shape}, is outside shape {layout.shape}"
        holders.add(holder)
        first.setdefault(box, holder)
    index = BoxIndex(first)
    for box, holder in first.items():
        for other, _ in index.find(box):
            if other != box:
                return f"the parts of holders {holder} and {first[other]} overlap and are not equal"
    covered, size = sum(box.volume for box in first), math.prod(layout.shape)
    return None if covered == size else f"the parts cover {covered} of {size} elements"
