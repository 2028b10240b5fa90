"""Compare the weights of two models, tensor by tensor and block by block, from Hugging Face folders or checkpoints.

Tensors of the same dtype are compared bit for bit, of different dtypes by value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headway.errors import ModelError
from headway.state.checkpoint_diff import Bits, TensorDifference, tensor_difference, values
from headway.state.huggingface import LazyWeight, Progress
from headway.state.safetensors_file import DTYPES

_STRETCH = 1 << 18  # elements converted to float64 at a time

Kind = tuple[str | None, tuple[int, ...]]
"""A tensor's dtype, if known, and its shape."""


@dataclass(frozen=True)
class TensorMismatches:
    """Tensors that are missing from one model, or differ in shape or dtype; pairs are (first, second)."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: Mapping[str, tuple[str, str]]
    """Of tensors with the same shape."""

    @property
    def none(self) -> bool:
        """Whether the models match."""
        return not (self.only_first or self.only_second or self.shapes or self.dtypes)


def tensor_mismatches(first: Mapping[str, Kind], second: Mapping[str, Kind]) -> TensorMismatches:
    """Compare names, shapes and dtypes; an unknown dtype matches any."""
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
    """Compare each tensor that both have in the same shape; equal ones are included."""
    common = [name for name in first if name in second and first[name].shape == second[name].shape]
    total, done = sum(first[name].bytes for name in common), 0
    differences = []
    for name in common:
        differences.append(_difference(name, first[name], second[name]))
        done += first[name].bytes
        if progress is not None:
            progress(done, total)
    return differences


def _difference(name: str, first: LazyWeight, second: LazyWeight) -> TensorDifference:
    pairs = _pairs(name, first, second)
    if first.dtype == second.dtype:
        return tensor_difference(name, pairs, first.dtype)
    converted = ((_as_float64(a, first.dtype), _as_float64(b, second.dtype)) for a, b in pairs)
    return tensor_difference(name, converted, "float64")


def _as_float64(bits: Bits, dtype: str) -> Bits:
    """The same values as bits of float64, exact for all smaller dtypes, with a single zero and a single NaN."""
    if "float" in dtype:
        numbers = values(bits, dtype)
    else:
        numbers = bits.view(f"<{'i' if dtype.startswith('int') else 'u'}{bits.itemsize}").astype(np.float64)
    numbers = numbers + 0.0
    numbers[np.isnan(numbers)] = np.nan
    return numbers.view("<u8")


def _pairs(name: str, first: LazyWeight, second: LazyWeight) -> Iterator[tuple[Bits, Bits]]:
    """The elements of both side by side; their blocks may have different sizes."""
    left, right = _stretches(first), _stretches(second)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        count = min(a.size, b.size, _STRETCH)
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]
        a, b = (a if a.size else next(left, None)), (b if b.size else next(right, None))
    if a is not None or b is not None:
        raise ModelError(f"{name} ends early in one of the two models", hint="download or copy its file again")


def _stretches(weight: LazyWeight) -> Iterator[Bits]:
    """A weight's elements as bits, block by block; blocks hold whole elements."""
    for block in weight.blocks():
        if len(block):
            yield np.frombuffer(block, dtype=f"<u{DTYPES[weight.dtype][1]}")
