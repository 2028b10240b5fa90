"""Distances of weights whose blocks are cut differently, in one dtype and in two."""

from collections.abc import Iterator

import numpy as np
import pytest

from headway.errors import ModelError
from headway.state.huggingface import LazyWeight
from headway.state.weight_diff import tensor_mismatches, weight_differences


def weight(array: np.ndarray, dtype: str, cut: int) -> LazyWeight:
    """In blocks of so many elements; a block is overwritten once the next is asked for, as those of files are."""

    def blocks() -> Iterator[memoryview]:
        buffer = np.empty(cut, array.dtype)
        for begin in range(0, array.size, cut):
            part = array.reshape(-1)[begin : begin + cut]
            buffer[:] = 0
            buffer[: part.size] = part
            yield buffer[: part.size].view(np.uint8).data

    return LazyWeight(dtype, array.shape, blocks)


@pytest.mark.parametrize(("first", "second"), [(1000, 1000), (7, 11), (64, 9), (3, 1000)])
def test_blocks_need_not_be_cut_alike(first: int, second: int) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((20, 31)).astype(np.float32)
    b = a + rng.choice([0, 0, 0, 1], a.shape).astype(np.float32) * rng.standard_normal(a.shape).astype(np.float32)
    (difference,) = weight_differences({"x": weight(a, "float32", first)}, {"x": weight(b, "float32", second)})
    gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
    assert (difference.elements, difference.differing) == (620, np.count_nonzero(a != b))
    assert difference.absolute == gap.max()
    assert difference.relative == (gap / np.maximum(np.abs(a), np.abs(b)).astype(np.float64)).max()


def test_two_dtypes_are_compared_by_value() -> None:
    """bfloat16 is the upper half of float32: what it can say is equal, and -0.0 is 0.0."""
    a = np.array([1.0, -2.5, 0.0, np.nan, 3.0], np.float32)
    bits = (np.array([1.0, -2.5, -0.0, np.nan, 3.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    (difference,) = weight_differences({"x": weight(a, "float32", 2)}, {"x": weight(bits, "bfloat16", 3)})
    assert (difference.differing, difference.absolute) == (1, 0.5)
    assert difference.relative == pytest.approx(0.5 / 3.5)


def test_one_dtype_is_compared_bit_for_bit() -> None:
    a, b = np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)
    (difference,) = weight_differences({"x": weight(a, "float32", 2)}, {"x": weight(b, "float32", 2)})
    assert (difference.differing, difference.absolute) == (1, 0.0)


def test_a_number_and_a_nan_are_infinitely_far_apart() -> None:
    a, b = np.array([1.0], np.float32), np.array([np.nan], np.float64)
    (difference,) = weight_differences({"x": weight(a, "float32", 1)}, {"x": weight(b, "float64", 1)})
    assert difference.absolute == np.inf


def test_a_truncated_weight_is_an_error() -> None:
    long, short = weight(np.zeros(8, np.float32), "float32", 8), weight(np.zeros(6, np.float32), "float32", 3)
    with pytest.raises(ModelError, match="ends early"):
        weight_differences({"x": long}, {"x": LazyWeight("float32", (8,), short.blocks)})


def test_names_shapes_and_dtypes() -> None:
    first = {"a": ("float32", (2, 3)), "b": ("float32", (4,)), "c": ("float32", (1,)), "e": (None, (5,))}
    second = {"a": ("float32", (3, 2)), "b": ("bfloat16", (4,)), "d": ("float32", (1,)), "e": ("float32", (5,))}
    difference = tensor_mismatches(first, second)
    assert (difference.only_first, difference.only_second) == (("c",), ("d",))
    assert difference.shapes == {"a": ((2, 3), (3, 2))}
    assert difference.dtypes == {"b": ("float32", "bfloat16")}
    assert not difference.none
    assert tensor_mismatches(first, first).none
