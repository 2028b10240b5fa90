import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import layout_fault

from headway.state.box import Box
from headway.state.layout import Layout, LayoutPart, replicated, sharded
from headway.state.move import Move, all_moves, moves
from thinned import examples

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def meshed(draw, shape):
    """A tensor on a mesh: cut in any order of the axes, nested or not; on any ranks, a pipeline's stage say."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))] if shape else []
    cuts = [(axis, draw(st.integers(0, len(shape) - 1))) for axis in axes]
    first, size = draw(st.integers(0, 8)), math.prod(mesh)
    return sharded(shape, mesh, cuts, draw(st.permutations(range(first, first + size))))


@st.composite
def shattered(draw, shape):
    """A tensor in pieces that form no grid, with copies of some: a box is cut in two, again and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box, dim = boxes.pop(draw(st.integers(0, len(boxes) - 1))), draw(st.integers(0, len(shape) - 1))
        left = draw(st.integers(0, box.shape[dim]))
        for begin, end in ((0, left), (left, box.shape[dim])):
            start = tuple(first + begin * (d == dim) for d, first in enumerate(box.start))
            boxes.append(Box(start, tuple(end - begin if d == dim else size for d, size in enumerate(box.shape))))
    boxes += [box for box in boxes if draw(st.booleans())]
    holders = draw(st.permutations(range(16)))
    return Layout(shape, tuple(LayoutPart(holder, box) for holder, box in zip(holders, boxes, strict=False)))


@st.composite
def pairs(draw):
    shape = draw(SHAPES)
    kinds = st.one_of(meshed(shape), shattered(shape))
    return draw(kinds), draw(kinds)


BUSY = st.dictionaries(st.integers(0, 20), st.integers(0, 50))


def boxes_of(layout):
    return {part.holder: part.box for part in layout.parts}


def elements(box, shape):
    """Numbers of the elements of a box."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices((0,) * len(shape))]


def carry_out(src, dst, planned):
    """Do the moves on arrays that hold a part each: what the targets hold then, and how often it was written."""
    sources = {holder: elements(box, src.shape) for holder, box in boxes_of(src).items()}
    targets = {holder: np.full(box.shape, -1) for holder, box in boxes_of(dst).items()}
    writes = {holder: np.zeros(box.shape, int) for holder, box in boxes_of(dst).items()}
    for move in planned:
        here, there = boxes_of(src)[move.source], boxes_of(dst)[move.target]
        for box in (here, there):
            local = tuple(first - zero for first, zero in zip(move.box.start, box.start, strict=True))
            assert Box(local, move.box.shape).inside(box.shape)
        where = move.box.slices(there.start)
        targets[move.target][where] = sources[move.source][move.box.slices(here.start)]
        writes[move.target][where] += 1
    return targets, writes


def assert_right(src, dst, planned):
    targets, writes = carry_out(src, dst, planned)
    for holder, box in boxes_of(dst).items():
        assert np.array_equal(targets[holder], elements(box, dst.shape))
        assert (writes[holder] == 1).all()


def sent(planned):
    """Elements that each source sends to others."""
    count = Counter()
    for move in planned:
        count[move.source] += move.box.volume if move.source != move.target else 0
    return count


@settings(deadline=None, max_examples=examples(100))
@given(pairs(), BUSY)
def test_moves_write_every_element_of_every_part_once(pair, busy):
    src, dst = pair
    assert layout_fault(src) is None
    assert layout_fault(dst) is None
    assert_right(src, dst, moves(src, dst, busy))


@settings(deadline=None, max_examples=examples(50))
@given(pairs())
def test_there_is_one_move_for_each_part_and_distinct_box_that_overlap(pair):
    src, dst = pair
    boxes = {box: set(elements(box, src.shape).flat) for box in boxes_of(src).values()}
    want = sum(bool(set(elements(part.box, dst.shape).flat) & held) for part in dst.parts for held in boxes.values())
    assert len(moves(src, dst)) == want


@settings(deadline=None, max_examples=examples(50))
@given(pairs(), BUSY)
def test_the_source_is_the_target_itself_or_the_least_busy_copy(pair, busy):
    src, dst = pair
    held = boxes_of(src)
    load = Counter(busy)
    for move in moves(src, dst, busy):
        copies = [holder for holder, box in held.items() if box == held[move.source]]
        if move.target in copies:
            assert move.source == move.target
        else:
            assert move.source == min(copies, key=lambda holder: (load[holder], holder))
            load[move.source] += move.box.volume


@settings(deadline=None, max_examples=examples(50))
@given(pairs(), st.randoms(use_true_random=False))
def test_moves_come_part_by_part_and_by_position_however_the_source_is_written_down(pair, random):
    src, dst = pair
    planned = moves(src, dst)
    order = [part.holder for part in dst.parts]
    places = [(order.index(move.target), move.box.start) for move in planned]
    assert places == sorted(places)
    assert moves(Layout(src.shape, tuple(random.sample(src.parts, len(src.parts)))), dst) == planned


@settings(deadline=None, max_examples=examples(50))
@given(SHAPES.flatmap(lambda shape: st.one_of(meshed(shape), shattered(shape))))
def test_from_a_layout_to_itself_every_holder_keeps_what_it_has(layout):
    assert moves(layout, layout) == [
        Move(part.holder, part.holder, part.box) for part in layout.parts if part.box.volume
    ]


@settings(deadline=None, max_examples=examples(50))
@given(pairs(), st.data())
def test_moves_of_one_part_equal_its_moves_among_all(pair, data):
    src, dst = pair
    part = data.draw(st.sampled_from(dst.parts))
    alone = moves(src, Layout(dst.shape, (part,)))
    assert_right(src, Layout(dst.shape, (part,)), alone)
    assert [move.box for move in alone] == [move.box for move in moves(src, dst) if move.target == part.holder]


@settings(deadline=None, max_examples=examples(50))
@given(st.data())
def test_copies_share_the_sending_of_a_complete_state(data):
    copies, shards, tensors = (data.draw(st.integers(1, 4)) for _ in range(3))
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=2)))
    src = sharded(shape, (copies, shards), [(1, 0)])
    laid_out = {f"w{i}": data.draw(meshed(shape)) for i in range(tensors)}
    # Other numbers than the sources have: nothing is there already.
    dst = {
        name: Layout(shape, tuple(LayoutPart(100 + p.holder, p.box) for p in a.parts)) for name, a in laid_out.items()
    }
    planned = all_moves(dict.fromkeys(dst, src), dst)
    assert list(planned) == list(dst)
    for name, target in dst.items():
        assert_right(src, target, planned[name])
    everything = [move for tensor_moves in planned.values() for move in tensor_moves]
    for box in {part.box for part in src.parts if part.box.volume}:
        holders = {part.holder for part in src.parts if part.box == box}
        of_box = [move for move in everything if move.source in holders]
        count = sent(of_box)
        largest = max(move.box.volume for move in of_box)
        assert max(count.values()) <= sum(count.values()) / len(holders) + largest


def test_the_largest_tensors_are_shared_out_first():
    # In the order given, 1 + 1 + 4 would leave one copy with 5 elements to send; 4 first leaves 4 and 2.
    src = {"a": replicated((1,), [0, 1]), "b": replicated((1,), [0, 1]), "c": replicated((4,), [0, 1])}
    dst = {name: replicated(layout.shape, [9]) for name, layout in src.items()}
    planned = all_moves(src, dst)
    assert list(planned) == ["a", "b", "c"]
    assert [planned[name][0].source for name in "cab"] == [0, 1, 1]


def test_local_regions_do_not_count_as_sent():
    src = {"large": replicated((8,), [0, 1]), "small": replicated((2,), [0, 1])}
    dst = {"large": replicated((8,), [0]), "small": replicated((2,), [9])}
    assert all_moves(src, dst)["small"] == [Move(0, 9, Box((0,), (2,)))]


def test_a_tensor_that_the_source_lacks_is_an_error():
    with pytest.raises(KeyError, match="head"):
        all_moves({"embed": replicated((2,), [0])}, {"embed": replicated((2,), [1]), "head": replicated((2,), [1])})


def test_mismatched_layouts_fail_an_assertion():
    with pytest.raises(AssertionError, match=r"shape \(4,\) cannot become one of shape \(2, 2\)"):
        moves(replicated((4,), [0]), replicated((2, 2), [1]))
    with pytest.raises(AssertionError, match="2 of the 4 elements"):
        moves(Layout((4,), (LayoutPart(0, at(0, 2)),)), replicated((4,), [1]))
    with pytest.raises(AssertionError, match="0 of the 1 elements"):
        moves(Layout((), ()), replicated((), [1]))


def at(start, stop):
    return Box((start,), (stop - start,))


def lay(shape, **parts):
    return Layout(shape, tuple(LayoutPart(int(holder[1:]), box) for holder, box in parts.items()))


PINWHEEL = lay((3, 3), r0=Box((0, 0), (1, 2)), r1=Box((0, 2), (2, 1)), r2=Box((2, 1), (1, 2)), r3=Box((1, 0), (2, 1)),
               r4=Box((1, 1), (1, 1)))  # fmt: skip
BESIDE = Layout(
    (6, 2), (LayoutPart(0, Box((0, 0), (6, 1))), *(LayoutPart(1 + row, Box((row, 1), (1, 1))) for row in range(6)))
)
TABLE = [
    ("gather", sharded((5,), (2,), [(0, 0)]), replicated((5,), [9]), {}, [(0, 9, at(0, 3)), (1, 9, at(3, 5))]),
    ("scatter", replicated((5,), [9]), sharded((5,), (2,), [(0, 0)]), {}, [(9, 0, at(0, 3)), (9, 1, at(3, 5))]),
    ("scalar to each", replicated((), [0]), replicated((), [0, 1]), {}, [(0, 0, Box((), ())), (0, 1, Box((), ()))]),
    ("nothing to move", sharded((0, 4), (2,), [(0, 1)]), replicated((0, 4), [5]), {}, []),
    ("an empty part", sharded((2,), (2,), [(0, 0)]), sharded((2,), (4,), [(0, 0)], [6, 7, 8, 9]), {},
     [(0, 6, at(0, 1)), (1, 7, at(1, 2))]),
    ("copies in turn", replicated((6,), [3, 1]), sharded((6,), (3,), [(0, 0)], [7, 8, 9]), {},
     [(1, 7, at(0, 2)), (3, 8, at(2, 4)), (1, 9, at(4, 6))]),
    ("a copy that is busy", replicated((6,), [3, 1]), sharded((6,), (3,), [(0, 0)], [7, 8, 9]), {1: 3},
     [(3, 7, at(0, 2)), (3, 8, at(2, 4)), (1, 9, at(4, 6))]),
    ("own copy though busy", replicated((2,), [0, 1]), replicated((2,), [1]), {1: 99}, [(1, 1, at(0, 2))]),
    ("rows to columns", sharded((2, 2), (2,), [(0, 0)]), sharded((2, 2), (2,), [(0, 1)]), {},
     [(0, 0, Box((0, 0), (1, 1))), (1, 0, Box((1, 0), (1, 1))),
      (0, 1, Box((0, 1), (1, 1))), (1, 1, Box((1, 1), (1, 1)))]),
    ("no grid", PINWHEEL, lay((3, 3), r9=Box((1, 0), (1, 3))), {},
     [(3, 9, Box((1, 0), (1, 1))), (4, 9, Box((1, 1), (1, 1))), (1, 9, Box((1, 2), (1, 1)))]),
    ("a long box beside short ones", BESIDE, lay((6, 2), r9=Box((5, 0), (1, 2))), {},
     [(0, 9, Box((5, 0), (1, 1))), (6, 9, Box((5, 1), (1, 1)))]),
    ("four ranks to six", sharded((12,), (4,), [(0, 0)]), sharded((12,), (6,), [(0, 0)]), {},
     [(0, 0, at(0, 2)), (0, 1, at(2, 3)), (1, 1, at(3, 4)), (1, 2, at(4, 6)), (2, 3, at(6, 8)), (2, 4, at(8, 9)),
      (3, 4, at(9, 10)), (3, 5, at(10, 12))]),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst", "busy", "want"), [case[1:] for case in TABLE], ids=[c[0] for c in TABLE])
def test_moves_by_hand(src, dst, busy, want):
    assert [(move.source, move.target, move.box) for move in moves(src, dst, busy)] == want


def test_checkpoint_files_to_ranks():
    """Eight files, rows; ranks of another mesh read what they need: two shards by rows and columns, twice."""
    files = sharded((16, 6), (8,), [(0, 0)], ranks=range(1000, 1008))
    ranks = sharded((16, 6), (2, 2, 2), [(1, 0), (2, 1)])
    planned = moves(files, ranks)
    assert_right(files, ranks, planned)
    assert len(planned) == 8 * 4
    assert {move.source for move in planned if move.target == 5} == {1000, 1001, 1002, 1003}


def test_ranks_to_checkpoint_files():
    """Four shards with three copies each; every element is written to a file once, and the copies share the work."""
    ranks = sharded((12,), (3, 4), [(1, 0)])
    files = sharded((12,), (12,), [(0, 0)], ranks=range(1000, 1012))
    planned = moves(ranks, files)
    assert_right(ranks, files, planned)
    assert sent(planned) == dict.fromkeys(range(12), 1)


def test_a_node_to_its_peer():
    """Each rank of a node that came back gets all it needs from the one that holds the same, and from no other."""
    cut = [(1, 0), (0, 0)]
    here, there = (sharded((10, 4), (4, 2), cut, ranks=range(first, first + 8)) for first in (0, 8))
    planned = moves(here, there)
    assert_right(here, there, planned)
    # Ten rows, halved and cut in four: 2, 2, 1 and none, so that the last two ranks of each node have nothing.
    assert {(move.source, move.target) for move in planned} == {(rank, rank + 8) for rank in range(6)}


def test_a_live_resize_keeps_what_stays():
    """Four ranks become six: elements that a rank has before and after never leave it."""
    before, after = sharded((60, 2), (4,), [(0, 0)]), sharded((60, 2), (6,), [(0, 0)])
    planned = moves(before, after)
    assert_right(before, after, planned)
    # Rank r has rows 15r to 15r + 15 before, 10r to 10r + 10 after: 10, 5, 0 and 0 of them are the same.
    assert {move.source: move.box.shape[0] for move in planned if move.source == move.target} == {0: 10, 1: 5}


def test_a_training_mesh_to_inference_engines():
    """Two stages of 4 x 2 ranks, FSDP within tensor parallel; two engines of four tensor-parallel ranks each."""
    stages = [range(8), range(8, 16)]
    cuts = {"up": [(1, 0), (0, 0)], "down": [(1, 1), (0, 0)], "norm": [(0, 0)]}
    shapes = {"up": (24, 8), "down": (8, 24), "norm": (8,)}
    src = {f"{s}.{n}": sharded(shapes[n], (4, 2), cuts[n], stages[s]) for s in (0, 1) for n in shapes}
    engine = {"up": [(1, 0)], "down": [(1, 1)], "norm": []}
    dst = {f"{s}.{n}": sharded(shapes[n], (2, 4), engine[n], range(1000, 1008)) for s in (0, 1) for n in shapes}
    planned = all_moves(src, dst)
    for name in dst:
        assert_right(src[name], dst[name], planned[name])
        assert {move.source for move in planned[name]} <= {*stages[int(name[0])]}
    # 24 rows: a training rank has 3 of them, an engine's rank 6.
    assert len(planned["0.up"]) == 8 * 2
    # The norm's shards have two copies each and go to eight ranks: each copy serves four of them, two elements a time.
    assert sent(planned["1.norm"]) == dict.fromkeys(stages[1], 8)


@pytest.mark.parametrize("dim", [0, 1])
def test_thousands_of_ranks(dim):
    """Trying each pair would take eight million overlaps."""
    shape = (3, 1 << 16) if dim else (1 << 16, 3)
    src = sharded(shape, (4096,), [(0, dim)])
    dst = sharded(shape, (2048,), [(0, dim)], ranks=range(10_000, 12_048))
    assert [(move.source, move.target) for move in moves(src, dst)] == [
        (rank, 10_000 + rank // 2) for rank in range(4096)
    ]
