import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway.state.digest as code
from headway.state.box import Box
from headway.state.digest import digest_box, state_digest
from thinned import examples

M = 2**64
SIZES = [1, 2, 4, 8]


def mix(n):
    x = n * 0x9E3779B97F4A7C15 % M
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 % M
    return x ^ x >> 32


def weight(j):
    return (mix(1 + j % 128) >> 33 | 1) * (mix(2**32 + j // 128) | 1) % M


def words(array):
    if array.itemsize == 8:
        return [bits ^ bits >> 32 for bits in map(int, array.reshape(-1))]
    data = array.tobytes()
    return [int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in range(0, len(data), 4)]


def by_definition(array):
    """The definition, in plain integers."""
    return sum(word * weight(j) for j, word in enumerate(words(array))) % M


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


def digest_of_tiles(array, boxes):
    return sum(digest_box(array[box.slices((0,) * array.ndim)], array.shape, box) for box in boxes) % M


@pytest.fixture
def small_blocks(monkeypatch):
    """Everything that is done in blocks is done in several, within arrays that plain integers can hash."""
    monkeypatch.setattr(code, "STACK", 2)
    monkeypatch.setattr(code, "BLOCK", 512)
    monkeypatch.setattr(code, "GROUP", 1024)


@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4), (31,), (32,), (129,), (700,), (40, 33)])
def test_digest_is_the_definition(itemsize, shape):
    array = random_bits(shape, itemsize)
    assert whole(array) == by_definition(array)


@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("shape", [(512,), (511,), (1024,), (4097,), (9000,), (3, 1500), (70, 129)])
def test_digest_is_the_definition_over_many_blocks(itemsize, shape, small_blocks):
    array = random_bits(shape, itemsize)
    assert whole(array) == by_definition(array)


@pytest.mark.parametrize("bits", [0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x80008000])
def test_the_largest_words_are_summed_exactly(bits):
    array = np.full(1000, bits, "<u4")
    assert whole(array) == by_definition(array)
    assert whole(array.view("<u2")) == whole(array.view("<u1")) == whole(array)
    wide = np.full(1000, bits << 32 | bits, "<u8")
    assert whole(wide) == by_definition(wide)


@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_digest_accepts_any_memory_layout(itemsize, skipped, small_blocks):
    """Odd addresses, as in a file that is mapped, and elements that do not follow each other."""
    array = random_bits((2000,), itemsize)
    memory = bytearray(skipped) + array.tobytes()
    moved = np.frombuffer(memory, array.dtype, offset=skipped)
    assert whole(moved) == by_definition(array)
    spread = random_bits((2000, 1 + skipped), itemsize)[:, 0]
    assert whole(spread) == by_definition(spread.copy())


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_tiling_adds_up_to_the_same_digest(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    array = random_bits(shape, data.draw(st.sampled_from(SIZES)), seed=data.draw(st.integers(0, 99)))
    assert digest_of_tiles(array, data.draw(tiling(shape))) == by_definition(array)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_tiling_of_long_rows_adds_up_to_the_same_digest(small_blocks, data):
    shape = data.draw(st.sampled_from([(5, 700), (3, 2, 301), (33, 64), (2, 2048), (16, 256), (2500,), (40, 45)]))
    array = random_bits(shape, data.draw(st.sampled_from(SIZES)), seed=data.draw(st.integers(0, 99)))
    assert digest_of_tiles(array, data.draw(tiling(shape))) == by_definition(array)


@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("shape", [(code.GROUP * 4 + 17,), (3, code.GROUP + 3), (code.GROUP // 50, 70)])
def test_digest_does_not_depend_on_how_large_arrays_are_cut(shape, itemsize):
    array = random_bits(shape, itemsize)
    boxes = [Box((0,) * len(shape), shape)]
    for dim, size in enumerate(shape):  # cut every dimension in two: all corners
        cut = size // 3
        boxes = [
            Box(
                (*box.start[:dim], first, *box.start[dim + 1 :]),
                (*box.shape[:dim], last - first, *box.shape[dim + 1 :]),
            )
            for box in boxes
            for first, last in ((0, cut), (cut, size))
        ]
    before = whole(array)
    assert digest_of_tiles(array, boxes) == before
    changed = array.copy()  # and against the definition, through the change of one element at the end
    changed.reshape(-1)[array.size - 2] ^= 1 << 5
    per_word = max(1, 4 // itemsize)
    j = (array.size - 2) // per_word
    old, new = (words(x.reshape(-1)[j * per_word : (j + 1) * per_word])[0] for x in (array, changed))
    assert old != new
    assert (whole(changed) - before - (new - old) * weight(j)) % M == 0


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_changed_element_and_a_swap_are_noticed(data):
    itemsize = data.draw(st.sampled_from(SIZES))
    array = random_bits((data.draw(st.integers(2, 300)),), itemsize, seed=data.draw(st.integers(0, 9)))
    before = whole(array)
    i, j = data.draw(st.tuples(*[st.integers(0, array.size - 1)] * 2))
    changed = array.copy()
    changed[i] ^= changed.dtype.type(data.draw(st.integers(1, 2 ** (8 * itemsize) - 1)))
    assert whole(changed) != before
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


def test_no_two_signs_among_many_cancel():
    """A sign in word j counts 2**31 * weight(j): two may cancel if weights are equal modulo 2**33 but for sign."""
    weights = {weight(j) % 2**33 for j in range(2**14)}
    assert len(weights | {2**33 - w for w in weights}) == 2 * 2**14
    assert len({mix(1 + k) >> 33 | 1 for k in range(128)}) == 128  # so that within a row none ever do


def test_moved_rows_change_the_digest():
    array = random_bits((16, 256), 2)
    digests = {whole(np.roll(array, shift, axis=0)) for shift in range(16)}
    digests |= {whole(np.roll(array, shift, axis=1)) for shift in (1, 2, 128)}
    for i in range(16):
        for j in range(i):
            order = list(range(16))
            order[i], order[j] = j, i
            digests.add(whole(array[order]))
    assert len(digests) == 16 + 3 + 16 * 15 // 2


def test_equal_elements_do_not_cancel():
    """Ones everywhere: each length has its own digest. (Zeros have the digest 0; the shape tells those apart.)"""
    digests = {whole(np.ones(n, "<u4")) for n in range(1, 2000)}
    assert len(digests) == 1999


def test_state_digest_ignores_order_and_sees_every_field():
    a, b = ("model/a", "float32", (2, 3), 5), ("model/b", "bfloat16", (), 6)
    lines = "model/a float32 2x3 0000000000000005\nmodel/b bfloat16  0000000000000006\n"
    assert state_digest([b, a]) == hashlib.sha256(lines.encode()).hexdigest()[:32] == state_digest([a, b])
    others = [("model/c", *a[1:]), (a[0], "int32", *a[2:]), (*a[:2], (3, 2), 5), (*a[:3], 4)]
    assert len({state_digest([other, b]) for other in others} | {state_digest([a, b])}) == 5
