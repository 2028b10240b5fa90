"""Convert tensors between Headway's and Hugging Face's shapes: split, joined and transposed, bit for bit.

Works on bits (unsigned integers of the dtype's size): values are moved, never computed with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.recipe.model import HfTensor

Bits = npt.NDArray[np.unsignedinteger[Any]]
Shape = tuple[int, ...]


def packed_shape(form: HfTensor, headway_shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a Hugging Face tensor."""
    shapes = [headway_shapes[name] for name in form.headway_names]
    first = shapes[0]
    match form.form:
        case "same" | "copy":
            return first
        case "expert":
            return first[1:]
        case "rows" | "heads":
            return (sum(shape[0] for shape in shapes), *first[1:])
        case "transposed":
            return (*first[1:], sum(shape[0] for shape in shapes))
        case "experts-transposed":
            return (first[0], *reversed(first[1:]))
        case "experts-paired":
            return (first[0], *reversed(first[2:]), 2 * first[1])


def pack(form: HfTensor, headway: Sequence[Bits]) -> Bits:
    """Build a Hugging Face tensor from the Headway tensors that it holds."""
    match form.form:
        case "same" | "copy":
            return headway[0]
        case "expert":
            return np.asarray(headway[0][form.index])
        case "rows":
            return np.concatenate(headway)
        case "transposed":
            return np.moveaxis(np.concatenate(headway), 0, -1)
        case "heads":
            heads = [tensor.reshape(form.index, -1, *tensor.shape[1:]) for tensor in headway]
            return np.concatenate(heads, axis=1).reshape(-1, *headway[0].shape[1:])
        case "experts-transposed":
            return np.swapaxes(headway[0], 1, 2)
        case "experts-paired":
            pairs = np.stack(headway, axis=2)
            return np.moveaxis(pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:]), 1, -1)


def unpack(form: HfTensor, packed: Bits, which: int) -> Bits:
    """Extract Headway tensor number `which` from a Hugging Face tensor; its parts are rows or of equal size."""
    match form.form:
        case "same" | "copy":
            return packed
        case "rows":
            return packed[_rows(form, which)]
        case "transposed":
            return np.moveaxis(packed, -1, 0)[_rows(form, which)]
        case "heads":
            heads = packed.reshape(form.index, len(form.headway_names), -1, *packed.shape[1:])
            return heads[:, which].reshape(-1, *packed.shape[1:])
        case "experts-transposed":
            return np.swapaxes(packed, 1, 2)
        case "experts-paired":
            return np.moveaxis(packed, -1, 1)[:, which::2]
        case "expert":
            raise AssertionError("the tensor of one expert is a slice of Headway's: join them instead")


def _rows(form: HfTensor, which: int) -> slice:
    begin = sum(form.rows[:which])
    return slice(begin, begin + form.rows[which])
