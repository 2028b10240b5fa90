import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.state.box import Box, overlap, tiling_fault
from thinned import examples


@st.composite
def box_in(draw, shape):
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(start, tuple(draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True)))


@st.composite
def shape_and_boxes(draw, count):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return shape, [draw(box_in(shape)) for _ in range(draw(st.integers(*count)))]


def painted(shape, boxes):
    """How many boxes cover each element: the truth, element by element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices((0,) * len(shape))] += 1
    return counts


@settings(deadline=None, max_examples=examples(50))
@given(shape_and_boxes((2, 2)))
def test_overlap_is_what_both_paint(case):
    shape, (a, b) = case
    both = painted(shape, [a]) * painted(shape, [b])
    common = overlap(a, b)
    assert np.array_equal(painted(shape, [common] if common else []), both)


@settings(deadline=None, max_examples=examples(50))
@given(shape_and_boxes((0, 6)))
def test_tiling_fault_is_none_exactly_when_every_element_is_painted_once(case):
    shape, boxes = case
    assert (tiling_fault(shape, boxes) is None) == bool((painted(shape, boxes) == 1).all())


def test_tiling_fault_says_what_is_wrong():
    assert "overlap" in tiling_fault((4,), [Box((0,), (3,)), Box((2,), (2,))])
    assert "3 of 4" in tiling_fault((4,), [Box((0,), (3,))])
    assert "outside" in tiling_fault((4,), [Box((0,), (5,))])
    assert "outside" in tiling_fault((4,), [Box((0, 0), (4, 1))])
    assert tiling_fault((), [Box((), ())]) is None
    assert "overlap" in tiling_fault((), [Box((), ()), Box((), ())])
