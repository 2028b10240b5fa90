"""Are two checkpoints the same state? Their digests tell at once; where they differ, the contents tell by how much.

Equal means equal bits. Distances are of values: between 0.0 and -0.0 it is 0, and between a NaN and a number infinite.
A relative distance is |a - b| / max(|a|, |b|): the same whichever comes first, and 2 at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.recipe.load import leaves
from headway.state.bands import band_bytes, read_bands
from headway.state.manifest import CheckpointManifest, TensorEntry
from headway.state.read_checkpoint import OpenCheckpoint
from headway.state.safetensors_file import DTYPES

__all__ = ["CheckpointDiff", "TensorDifference", "describe", "diff_checkpoints", "distance", "values"]

Bits = NDArray[np.unsignedinteger]
Floats = NDArray[np.float64]

FACTS = ("step", "cursor", "chain", "data_version", "workers", "mesh")
_BLOCK = 1 << 18  # elements that are turned into float64 at a time


@dataclass(frozen=True)
class TensorDifference:
    """How far apart a tensor is in two checkpoints that both have it in the same shape and dtype."""

    name: str
    elements: int
    differing: int
    """Elements whose bits differ."""
    absolute: float
    """The largest distance between two values."""
    relative: float
    """The largest distance, as a share of the larger of the two."""


@dataclass(frozen=True)
class CheckpointDiff:
    """Two checkpoints side by side; pairs are (first, second)."""

    equal: bool
    """Whether they have the same tensors, bit for bit."""
    by: Literal["digest", "contents"]
    """What was compared to know."""
    tensors: int
    """How many both have."""
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    unlike: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tensors of different shape or dtype."""
    differing: tuple[TensorDifference, ...] = ()
    """Tensors that differ, the largest distance first."""
    facts: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Step, cursor, chain and the like, where they differ."""
    recipe: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the recipe that differ."""
    same_rng: bool = True
    """Whether the random generators were in the same state."""


def diff_checkpoints(
    first: OpenCheckpoint, second: OpenCheckpoint, progress: Callable[[int, int], None] | None = None
) -> CheckpointDiff:
    """Compare two checkpoints; only tensors whose digests do not settle it are read, a band at a time."""
    a, b = first.manifest, second.manifest
    common = [name for name in a.tensors if name in b.tensors]
    facts: dict[str, Any] = {
        "facts": _pairs({key: getattr(a, key) for key in FACTS}, {key: getattr(b, key) for key in FACTS}),
        "recipe": _pairs(dict(leaves(a.recipe)), dict(leaves(b.recipe))),
        "same_rng": a.rng == b.rng,
    }
    if a.digest_function == b.digest_function and a.digest == b.digest:
        return CheckpointDiff(True, "digest", len(common), **facts)
    only_first = tuple(name for name in a.tensors if name not in b.tensors)
    only_second = tuple(name for name in b.tensors if name not in a.tensors)
    unlike = _pairs(*({name: describe(m.tensors[name]) for name in common} for m in (a, b)))
    unsettled = [name for name in common if name not in unlike and not _settled(a, b, name)]
    differing = _measure_all(first, second, unsettled, progress)
    equal = not (only_first or only_second or unlike or differing)
    return CheckpointDiff(equal, "contents", len(common), only_first, only_second, unlike, differing, **facts)


def describe(tensor: TensorEntry) -> str:
    """A tensor's dtype and shape in words."""
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def values(bits: Bits, dtype: str) -> Floats:
    """What the bits of a floating-point dtype mean."""
    with np.errstate(all="ignore"):  # a signalling NaN is no news here
        match dtype:
            case "bfloat16":
                return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
            case "float8_e5m2":  # the upper half of a float16
                return (bits.astype("<u2") << 8).view("<f2").astype(np.float64)
            case "float8_e4m3fn":
                return _e4m3fn()[bits]
        return bits.view(f"<f{bits.itemsize}").astype(np.float64)


def distance(a: Bits, b: Bits, dtype: str) -> tuple[Floats, Floats]:
    """The distance of each pair of elements, and as a share of the larger of the two."""
    if "float" in dtype:
        x, y = values(a, dtype), values(b, dtype)
        with np.errstate(all="ignore"):
            absolute = np.abs(x - y)
        absolute[np.isnan(absolute)] = np.inf
        absolute[(np.isnan(x) & np.isnan(y)) | (x == y)] = 0.0
    else:
        signed = f"<{'i' if dtype.startswith('int') else 'u'}{a.itemsize}"
        whole_x, whole_y = a.view(signed), b.view(signed)
        # Modulo 2**n the larger less the smaller is exact, where the same in float64 would not be.
        gap = np.where(whole_x > whole_y, a - b, b - a)
        absolute, x, y = (array.astype(np.float64) for array in (gap, whole_x, whole_y))
    with np.errstate(all="ignore"):
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
    relative[absolute == 0] = 0.0
    relative[np.isinf(absolute)] = np.inf
    return absolute, relative


def _settled(a: CheckpointManifest, b: CheckpointManifest, name: str) -> bool:
    """Whether a tensor's digest says that it is the same."""
    return a.digest_function == b.digest_function and a.tensors[name].digest == b.tensors[name].digest


def _measure_all(
    first: OpenCheckpoint, second: OpenCheckpoint, names: list[str], progress: Callable[[int, int], None] | None
) -> tuple[TensorDifference, ...]:
    sizes = {name: _elements(first, name) * DTYPES[first.manifest.tensors[name].dtype][1] for name in names}
    total, done = sum(sizes.values()), 0
    found = []
    for name in names:
        difference = TensorDifference(name, _elements(first, name), 0, 0.0, 0.0)
        limit, dtype = band_bytes(first, second), first.manifest.tensors[name].dtype
        for a, b in zip(read_bands(first, name, limit), read_bands(second, name, limit), strict=True):
            difference = _add(difference, a, b, dtype)
            done += a.nbytes
            if progress is not None:
                progress(done, total)
        if difference.differing:
            found.append(difference)
    return tuple(
        sorted(found, key=lambda one: (not one.name.startswith("model/"), -one.absolute, -one.relative, one.name))
    )


def _elements(checkpoint: OpenCheckpoint, name: str) -> int:
    return sum(piece.box.volume for piece in checkpoint.manifest.tensors[name].pieces)


def _add(so_far: TensorDifference, a: Bits, b: Bits, dtype: str) -> TensorDifference:
    """What is known of a tensor once another band of it is seen, a block at a time."""
    differing, absolute, relative = so_far.differing, so_far.absolute, so_far.relative
    for begin in range(0, a.size, _BLOCK):
        block_a, block_b = a[begin : begin + _BLOCK], b[begin : begin + _BLOCK]
        differs = block_a != block_b
        count = int(np.count_nonzero(differs))
        if count:
            far, share = distance(block_a[differs], block_b[differs], dtype)
            differing += count
            absolute, relative = max(absolute, float(far.max())), max(relative, float(share.max()))
    return TensorDifference(so_far.name, so_far.elements, differing, absolute, relative)


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both of them; None where one has no such key."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


@lru_cache(maxsize=1)
def _e4m3fn() -> Floats:
    """The value of each of its 256 codes: four bits of exponent, three of mantissa, no infinities and one NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, size, -size)
