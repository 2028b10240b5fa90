import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import layout_fault
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor_box
from torch.distributed.tensor.placement_types import _StridedShard

from headway.state.box import Box
from headway.state.layout import BoxIndex, Layout, LayoutPart, box_at, replicated, sharded
from thinned import examples


@st.composite
def cut_meshes(draw):
    """A shape, a mesh, and cuts by some of its axes in any order, several of one dim among them."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))] if shape else []
    return shape, mesh, [(axis, draw(st.integers(0, len(shape) - 1))) for axis in axes]


@st.composite
def boxes_in(draw, shape, count):
    boxes = []
    for _ in range(draw(st.integers(0, count))):
        start = tuple(draw(st.integers(0, size)) for size in shape)
        boxes.append(Box(start, tuple(draw(st.integers(0, n - first)) for n, first in zip(shape, start, strict=True))))
    return boxes


@st.composite
def shapes_and_boxes(draw, count):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return shape, draw(boxes_in(shape, count))


def painted(shape, boxes):
    """How many boxes cover each element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices((0,) * len(shape))] += 1
    return counts


def chunked(shape, mesh, cuts, place):
    """Numbers of the elements at one place, by torch.chunk, which leaves out chunks that would be empty."""
    elements = torch.arange(math.prod(shape)).reshape(shape)
    for axis, dim in cuts:
        chunks = elements.chunk(mesh[axis], dim)
        elements = chunks[place[axis]] if place[axis] < len(chunks) else elements.narrow(dim, 0, 0)
    return elements.numpy()


@settings(deadline=None, max_examples=examples(50))
@given(cut_meshes())
def test_a_box_is_what_nested_chunks_leave(case):
    shape, mesh, cuts = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    for place in itertools.product(*map(range, mesh)):
        box = box_at(shape, mesh, cuts, place)
        assert box.inside(shape)
        want = chunked(shape, mesh, cuts, place)
        assert box.shape == want.shape
        assert np.array_equal(elements[box.slices((0,) * len(shape))], want)


@settings(deadline=None, max_examples=examples(50))
@given(cut_meshes(), st.randoms(use_true_random=False))
def test_spread_puts_the_tensor_once_on_the_cut_axes_and_copies_on_the_others(case, random):
    shape, mesh, cuts = case
    ranks = random.sample(range(100), math.prod(mesh))
    layout = sharded(shape, mesh, cuts, ranks)
    assert layout.shape == shape
    assert layout_fault(layout) is None
    copies = math.prod(size for axis, size in enumerate(mesh) if axis not in dict(cuts))
    assert (painted(shape, [part.box for part in layout.parts]) == copies).all()
    assert (painted(shape, {part.box for part in layout.parts}) == 1).all()
    at = {part.holder: part.box for part in layout.parts}
    for place in itertools.product(*map(range, mesh)):
        assert at[ranks[np.ravel_multi_index(place, mesh)]] == box_at(shape, mesh, cuts, place)


def at(start, stop):
    return Box((start,), (stop - start,))


TABLE = [
    ("no axis", (3,), (), [], {0: at(0, 3)}),
    ("one axis", (4,), (2,), [(0, 0)], {0: at(0, 2), 1: at(2, 4)}),
    ("copies", (4,), (2,), [], {0: at(0, 4), 1: at(0, 4)}),
    ("last one shorter", (5,), (3,), [(0, 0)], {0: at(0, 2), 1: at(2, 4), 2: at(4, 5)}),
    ("last one empty", (4,), (3,), [(0, 0)], {0: at(0, 2), 1: at(2, 4), 2: at(4, 4)}),
    ("less than the mesh", (1,), (3,), [(0, 0)], {0: at(0, 1), 1: at(1, 1), 2: at(1, 1)}),
    ("nothing", (0,), (2,), [(0, 0)], {0: at(0, 0), 1: at(0, 0)}),
    ("last axis fastest", (4,), (2, 2), [(1, 0)], {0: at(0, 2), 1: at(2, 4), 2: at(0, 2), 3: at(2, 4)}),
    ("outer axis first", (8,), (2, 2), [(0, 0), (1, 0)], {0: at(0, 2), 1: at(2, 4), 2: at(4, 6), 3: at(6, 8)}),
    ("inner axis first", (8,), (2, 2), [(1, 0), (0, 0)], {0: at(0, 2), 1: at(4, 6), 2: at(2, 4), 3: at(6, 8)}),
    ("uneven in uneven", (5,), (2, 2), [(1, 0), (0, 0)], {0: at(0, 2), 1: at(3, 4), 2: at(2, 3), 3: at(4, 5)}),
    ("scalar", (), (2,), [], {0: Box((), ()), 1: Box((), ())}),
    ("two dims", (2, 3), (2, 2), [(0, 0), (1, 1)],
     {0: Box((0, 0), (1, 2)), 1: Box((0, 2), (1, 1)), 2: Box((1, 0), (1, 2)), 3: Box((1, 2), (1, 1))}),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "mesh", "cuts", "want"), [case[1:] for case in TABLE], ids=[c[0] for c in TABLE])
def test_spread_by_hand(shape, mesh, cuts, want):
    assert {part.holder: part.box for part in sharded(shape, mesh, cuts).parts} == want


def test_ranks_are_named_in_the_order_of_the_mesh():
    layout = sharded((4,), (2, 2), [(0, 0)], ranks=[12, 8, 13, 9])
    assert layout.parts == (
        LayoutPart(12, at(0, 2)),
        LayoutPart(8, at(0, 2)),
        LayoutPart(13, at(2, 4)),
        LayoutPart(9, at(2, 4)),
    )


def test_replicated_is_a_copy_on_each_holder():
    box = Box((0, 0), (2, 3))
    assert replicated((2, 3), [7, 5]) == Layout((2, 3), (LayoutPart(7, box), LayoutPart(5, box)))


@pytest.mark.parametrize("shape", [(13,), (4, 6), (1, 5, 3), (0, 2)])
@pytest.mark.parametrize("mesh", [(3,), (2, 3), (4, 2), (2, 1, 3)])
def test_boxes_are_those_of_dtensor_for_shards_and_copies(shape, mesh):
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    for placements in itertools.product(kinds, repeat=len(mesh)):
        cuts = [(axis, kind.dim) for axis, kind in enumerate(placements) if isinstance(kind, Shard)]
        assert_same_boxes(shape, mesh, cuts, placements)


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("shard", [1, 2, 3, 4])
def test_boxes_are_those_of_dtensor_for_fsdp_within_tensor_parallel(shard, tensor):
    # Where the tensor axis cuts unevenly, what DTensor says of a strided shard is not what FSDP's chunks are.
    for size in range(0, 8 * tensor, tensor):
        placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
        assert_same_boxes((size, 2), (shard, tensor), [(1, 0), (0, 0)], placements)


def assert_same_boxes(shape, mesh, cuts, placements):
    for place in itertools.product(*map(range, mesh)):
        local_shape, offset = dtensor_box(shape, mesh, list(place), placements)
        box = box_at(shape, mesh, cuts, place)
        assert box.shape == local_shape
        if box.volume:  # an empty shard begins at the end of the tensor there, at the end of what was cut here
            assert box.start == offset


def test_sharded_asserts_its_arguments():
    with pytest.raises(AssertionError, match="3 ranks"):
        sharded((4,), (2, 2), [(0, 0)], ranks=[0, 1, 2])
    with pytest.raises(AssertionError, match="cuts twice"):
        sharded((4, 4), (2,), [(0, 0), (0, 1)])


@settings(deadline=None, max_examples=examples(50))
@given(shapes_and_boxes(6))
def test_layout_fault_is_none_exactly_when_distinct_boxes_paint_every_element_once(case):
    shape, boxes = case
    layout = Layout(shape, tuple(LayoutPart(holder, box) for holder, box in enumerate(boxes)))
    assert (layout_fault(layout) is None) == bool((painted(shape, set(boxes)) == 1).all())


def test_layout_fault_says_what_is_wrong():
    def fault(shape, *parts):
        return layout_fault(Layout(shape, tuple(LayoutPart(holder, box) for holder, box in parts)))

    assert fault((4,), (0, at(0, 2)), (1, at(2, 4)), (2, at(0, 2)), (3, at(4, 4))) is None
    assert fault((0, 3)) is None
    assert "3 of 4" in fault((4,), (0, at(0, 3)), (1, at(0, 3)))
    assert "0 of 1" in fault(())
    assert "holder 7 appears twice" in fault((4,), (7, at(0, 2)), (7, at(2, 4)))
    assert "holders 5 and 9 overlap" in fault((4,), (5, at(0, 3)), (9, at(2, 4)))
    assert "holder 6, at (3,) of shape (2,), is outside" in fault((4,), (5, at(0, 3)), (6, at(3, 5)))
    assert "outside" in fault((4,), (5, Box((0, 0), (4, 1))))


@settings(deadline=None, max_examples=examples(50))
@given(st.data())
def test_an_index_finds_what_trying_every_box_finds(data):
    shape, boxes = data.draw(shapes_and_boxes(8))
    distinct = list(dict.fromkeys(boxes))
    index = BoxIndex(distinct)
    for box in [*data.draw(boxes_in(shape, 3)), Box((0,) * len(shape), shape)]:
        want = {other: painted(shape, [box]) * painted(shape, [other]) for other in distinct}
        overlaps = index.find(box)
        assert {other for other, _ in overlaps} == {other for other, both in want.items() if both.any()}
        assert len({other for other, _ in overlaps}) == len(overlaps)
        for other, common in overlaps:
            assert np.array_equal(painted(shape, [common]), want[other])
