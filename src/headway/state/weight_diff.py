"""How far two sets of weights are apart, tensor by tensor and a block at a time: of folders, checkpoints, either.

A tensor that both have in two dtypes is compared by its values; in one dtype, bit for bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headway.errors import ModelError
from headway.state.checkpoint_diff import Bits, TensorDifference, distance, values
from headway.state.huggingface import LazyWeight, Progress
from headway.state.safetensors_file import DTYPES

__all__ = ["TensorMismatches", "tensor_mismatches", "weight_differences"]

_BLOCK = 1 << 18  # elements that are turned into float64 at a time

Kind = tuple[str | None, tuple[int, ...]]
"""A tensor's dtype, if it has one yet, and its shape."""


@dataclass(frozen=True)
class TensorMismatches:
    """Tensors that two models do not both have alike; pairs are (first, second)."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: Mapping[str, tuple[str, str]]
    """Those of one shape."""

    @property
    def none(self) -> bool:
        """Whether there are none."""
        return not (self.only_first or self.only_second or self.shapes or self.dtypes)


def tensor_mismatches(first: Mapping[str, Kind], second: Mapping[str, Kind]) -> TensorMismatches:
    """Compare names, shapes and dtypes; where one side has no dtypes yet, they are no difference."""
    common = [name for name in first if name in second]
    shapes = {n: (first[n][1], second[n][1]) for n in common if first[n][1] != second[n][1]}
    dtypes = {}
    for name in common:
        a, b = first[name][0], second[name][0]
        if name not in shapes and a is not None and b is not None and a != b:
            dtypes[name] = (a, b)
    return TensorMismatches(
        only_first=tuple(name for name in first if name not in second),
        only_second=tuple(name for name in second if name not in first),
        shapes=shapes,
        dtypes=dtypes,
    )


def weight_differences(
    first: Mapping[str, LazyWeight], second: Mapping[str, LazyWeight], progress: Progress | None = None
) -> list[TensorDifference]:
    """How far apart each tensor is that both have in one shape, those that are equal included."""
    common = [name for name in first if name in second and first[name].shape == second[name].shape]
    total, done = sum(first[name].bytes for name in common), 0
    found = []
    for name in common:
        found.append(_difference(name, first[name], second[name]))
        done += first[name].bytes
        if progress is not None:
            progress(done, total)
    return found


def _difference(name: str, first: LazyWeight, second: LazyWeight) -> TensorDifference:
    differing, absolute, relative, elements = 0, 0.0, 0.0, 0
    for a, b in _pairs(name, first, second):
        elements += a.size
        count, far, share = _distances(a, b, first.dtype, second.dtype)
        differing += count
        absolute, relative = max(absolute, far), max(relative, share)
    return TensorDifference(name, elements, differing, absolute, relative)


def _distances(a: Bits, b: Bits, first: str, second: str) -> tuple[int, float, float]:
    """Of a block: how many differ, the largest distance, and the largest as a share of the larger of the two."""
    if first != second:
        a, b, first = _as_float64(a, first), _as_float64(b, second), "float64"
    differs = a != b
    count = int(np.count_nonzero(differs))
    if not count:
        return 0, 0.0, 0.0
    far, share = distance(a[differs], b[differs], first)
    return count, float(far.max()), float(share.max())


def _as_float64(bits: Bits, dtype: str) -> Bits:
    """The same values as bits of float64, in which those of all smaller dtypes are exact; one zero, and one NaN."""
    if "float" not in dtype:
        found = bits.view(f"<{'i' if dtype.startswith('int') else 'u'}{bits.itemsize}").astype(np.float64)
    else:
        found = values(bits, dtype)
    found = found + 0.0
    found[np.isnan(found)] = np.nan
    return found.view("<u8")


def _pairs(name: str, first: LazyWeight, second: LazyWeight) -> Iterator[tuple[Bits, Bits]]:
    """The elements of both side by side, in stretches; their blocks need not be cut alike."""
    left, right = _stretches(first), _stretches(second)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        count = min(a.size, b.size, _BLOCK)
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]
        a, b = (a if a.size else next(left, None)), (b if b.size else next(right, None))
    if a is not None or b is not None:
        raise ModelError(f"{name} ends early in one of the two", hint="download or copy its file again")


def _stretches(weight: LazyWeight) -> Iterator[Bits]:
    """A weight's elements as bits; blocks hold whole elements."""
    for block in weight.blocks():
        if len(block):
            yield np.frombuffer(block, dtype=f"<u{DTYPES[weight.dtype][1]}")
