"""How tensors of a Hugging Face folder hold ours: cut, joined and turned round, bit for bit.

Works on bits (unsigned numbers of the tensor's size) and on live tensors alike: nothing is computed with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.recipe.model import HfTensor

__all__ = ["Bits", "pack", "packed_shape", "unpack"]

Bits = npt.NDArray[np.unsignedinteger[Any]]
Shape = tuple[int, ...]


def packed_shape(form: HfTensor, ours: Mapping[str, Shape]) -> Shape:
    """The shape of one of their tensors."""
    shapes = [ours[name] for name in form.headway_names]
    first = shapes[0]
    match form.form:
        case "same":
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


def pack(form: HfTensor, ours: Sequence[Bits]) -> Bits:
    """One of their tensors, of those of ours that it holds."""
    match form.form:
        case "same":
            return ours[0]
        case "expert":
            return np.asarray(ours[0][form.index])
        case "rows":
            return np.concatenate(ours)
        case "transposed":
            return np.moveaxis(np.concatenate(ours), 0, -1)
        case "heads":
            apart = [part.reshape(form.index, -1, *part.shape[1:]) for part in ours]
            return np.concatenate(apart, axis=1).reshape(-1, *ours[0].shape[1:])
        case "experts-transposed":
            return np.swapaxes(ours[0], 1, 2)
        case "experts-paired":
            pairs = np.stack(ours, axis=2)
            return np.moveaxis(pairs.reshape(pairs.shape[0], -1, *pairs.shape[3:]), 1, -1)


def unpack(form: HfTensor, theirs: Bits, which: int) -> Bits:
    """One of ours, of the tensor that holds it and others; all parts are as large as each other, or are rows."""
    match form.form:
        case "same":
            return theirs
        case "rows":
            return theirs[_rows(form, which)]
        case "transposed":
            return np.moveaxis(theirs, -1, 0)[_rows(form, which)]
        case "heads":
            apart = theirs.reshape(form.index, len(form.headway_names), -1, *theirs.shape[1:])
            return apart[:, which].reshape(-1, *theirs.shape[1:])
        case "experts-transposed":
            return np.swapaxes(theirs, 1, 2)
        case "experts-paired":
            return np.moveaxis(theirs, -1, 1)[:, which::2]
        case "expert":
            raise AssertionError("a slice is a part of ours, and not the other way round")


def _rows(form: HfTensor, which: int) -> slice:
    begin = sum(form.rows[:which])
    return slice(begin, begin + form.rows[which])
