import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.state.box import Box
from headway.state.digest import BLOCK, digest_box, state_digest

M = 2**64


def one_element(bits, index, itemsize):
    """The definition, in plain integers."""
    if itemsize == 8:
        bits ^= bits >> 32
    x = (bits * 0xD6E8FEB86659FD93 + index * 0x9E3779B97F4A7C15) % M
    x ^= x >> 32
    x = x * 0xD6E8FEB86659FD93 % M
    return x ^ (x >> 32)


def by_definition(array):
    return sum(one_element(int(bits), i, array.itemsize) for i, bits in enumerate(array.reshape(-1))) % M


def whole(array):
    return digest_box(array, array.shape, Box((0,) * array.ndim, array.shape))


def random_bits(shape, itemsize, seed=0):
    drawn = np.random.default_rng(seed).bytes(int(np.prod(shape)) * itemsize)
    return np.frombuffer(drawn, f"<u{itemsize}").reshape(shape).copy()


@st.composite
def tiling(draw, shape):
    """A random tiling, by cutting boxes in two again and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not shape:
            return [box]
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        left = tuple(cut if d == dim else size for d, size in enumerate(box.shape))
        right = tuple(size - cut if d == dim else size for d, size in enumerate(box.shape))
        start = tuple(first + cut if d == dim else first for d, first in enumerate(box.start))
        boxes += [Box(box.start, left), Box(start, right)]
    return boxes


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_digest_is_the_definition(itemsize, shape):
    array = random_bits(shape, itemsize)
    assert whole(array) == by_definition(array)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_tiling_adds_up_to_the_same_digest(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    array = random_bits(shape, data.draw(st.sampled_from([1, 2, 4, 8])), seed=data.draw(st.integers(0, 99)))
    boxes = data.draw(tiling(shape))
    parts = [digest_box(array[box.slices((0,) * len(shape))], shape, box) for box in boxes]
    assert sum(parts) % M == by_definition(array)


@pytest.mark.parametrize("shape", [(BLOCK * 2 + 17,), (5, BLOCK + 3), (BLOCK // 3, 7), (300, 2, 301)])
def test_digest_does_not_depend_on_blocks(shape):
    array = random_bits(shape, 4)
    cut = tuple(size // 3 for size in shape)
    boxes = [Box((0,) * len(shape), shape)]
    for dim in range(len(shape)):  # cut every dimension in two: all corners
        boxes = [
            half
            for box in boxes
            for half in (
                Box(box.start, (*box.shape[:dim], cut[dim], *box.shape[dim + 1 :])),
                Box(
                    (*box.start[:dim], cut[dim], *box.start[dim + 1 :]),
                    (*box.shape[:dim], box.shape[dim] - cut[dim], *box.shape[dim + 1 :]),
                ),
            )
        ]
    total = sum(digest_box(array[box.slices((0,) * len(shape))], shape, box) for box in boxes)
    assert total % M == whole(array)
    changed = array.copy()  # and against the definition, through the change of one element behind the first block
    index = array.size - 2
    changed.reshape(-1)[index] ^= 1 << 5
    old, new = int(array.reshape(-1)[index]), int(changed.reshape(-1)[index])
    assert (whole(changed) - whole(array) - one_element(new, index, 4) + one_element(old, index, 4)) % M == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_and_a_swap_are_noticed(data):
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    array = random_bits((data.draw(st.integers(2, 300)),), itemsize, seed=data.draw(st.integers(0, 9)))
    before = whole(array)
    i, j = data.draw(st.tuples(*[st.integers(0, array.size - 1)] * 2))
    flipped = array.copy()
    flipped[i] ^= flipped.dtype.type(1 << data.draw(st.integers(0, 8 * itemsize - 1)))
    assert whole(flipped) != before
    swapped = array.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert (whole(swapped) != before) == (array[i] != array[j])


def test_structured_changes_are_noticed():
    zeros = np.zeros(64, "<f4")
    negated = zeros.copy()
    negated[7] = -0.0
    seen = {whole(zeros.view("<u4")), whole(negated.view("<u4"))}
    for itemsize in (2, 4, 8):
        array = random_bits((64,), itemsize)
        top = array.dtype.type(1 << (8 * itemsize - 1))
        before = whole(array)
        for i in range(64):
            for j in range(i):
                both = array.copy()
                both[[i, j]] ^= top  # the signs of two elements
                assert whole(both) != before
        for shift in range(1, 64):
            seen.add(whole(np.roll(array, shift)))
        seen.add(whole(array.reshape(8, 8).T.copy()))
    assert len(seen) == 2 + 3 * 64


def test_sums_of_zeros_do_not_cancel():
    """Equal elements everywhere: each length has its own digest."""
    digests = {whole(np.zeros(n, "<u4")) for n in range(1, 2000)}
    assert len(digests) == 1999


def test_state_digest_ignores_order_and_sees_every_field():
    a, b = ("model/a", "float32", (2, 3), 5), ("model/b", "bfloat16", (), 6)
    lines = "model/a float32 2x3 0000000000000005\nmodel/b bfloat16  0000000000000006\n"
    assert state_digest([b, a]) == hashlib.sha256(lines.encode()).hexdigest()[:32] == state_digest([a, b])
    others = [("model/c", *a[1:]), (a[0], "int32", *a[2:]), (*a[:2], (3, 2), 5), (*a[:3], 4)]
    assert len({state_digest([other, b]) for other in others} | {state_digest([a, b])}) == 5
