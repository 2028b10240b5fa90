"""Compare two checkpoints: by their digests first, and by their contents where those differ.

Equal means bit-identical. Distances are of values: 0 between 0.0 and -0.0, infinite between a NaN and a number. A
relative distance is |a - b| / max(|a|, |b|): symmetric, and at most 2.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headway.recipe.load import leaves
from headway.state.manifest import CheckpointManifest, TensorEntry
from headway.state.read_checkpoint import OpenCheckpoint, band_bytes, read_bands
from headway.state.safetensors_file import DTYPES

Bits = NDArray[np.unsignedinteger]
Floats = NDArray[np.float64]

FACTS = ("step", "cursor", "chain", "data_version", "workers", "mesh")
_BLOCK = 1 << 18  # elements converted to float64 at a time


@dataclass(frozen=True)
class TensorDifference:
    """How much two tensors of the same shape differ."""

    name: str
    elements: int
    differing: int
    """Elements whose bits differ."""
    absolute: float
    """The largest distance between two values."""
    relative: float
    """The largest relative distance."""


@dataclass(frozen=True)
class CheckpointDiff:
    """How two checkpoints differ; pairs are (first, second)."""

    equal: bool
    """Whether they have the same tensors, bit for bit."""
    by: Literal["digest", "contents"]
    """What settled it."""
    tensors: int
    """How many tensors both have."""
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    unlike: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tensors whose shape or dtype differs."""
    differing: tuple[TensorDifference, ...] = ()
    """Tensors that differ, the largest distance first."""
    facts: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Step, cursor, chain and the like that differ."""
    recipe: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the recipe that differ."""
    same_rng: bool = True
    """Whether the random generators had the same state."""


def diff_checkpoints(
    first: OpenCheckpoint, second: OpenCheckpoint, progress: Callable[[int, int], None] | None = None
) -> CheckpointDiff:
    """Compare two checkpoints; only tensors whose digests differ are read, band by band."""
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
    """Return a tensor's dtype and shape as text."""
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def values(bits: Bits, dtype: str) -> Floats:
    """Convert the bits of a floating-point dtype to float64."""
    with np.errstate(all="ignore"):  # a signalling NaN is not an error here
        match dtype:
            case "bfloat16":
                return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
            case "float8_e5m2":  # the upper half of a float16
                return (bits.astype("<u2") << 8).view("<f2").astype(np.float64)
            case "float8_e4m3fn":
                return _e4m3fn()[bits]
        return bits.view(f"<f{bits.itemsize}").astype(np.float64)


def distance(a: Bits, b: Bits, dtype: str) -> tuple[Floats, Floats]:
    """Return the absolute and the relative distance of each pair of elements."""
    if "float" in dtype:
        x, y = values(a, dtype), values(b, dtype)
        with np.errstate(all="ignore"):
            absolute = np.abs(x - y)
        absolute[np.isnan(absolute)] = np.inf
        absolute[(np.isnan(x) & np.isnan(y)) | (x == y)] = 0.0
    else:
        signed = f"<{'i' if dtype.startswith('int') else 'u'}{a.itemsize}"
        integer_x, integer_y = a.view(signed), b.view(signed)
        # The difference modulo 2**n is exact; in float64 it would not be.
        gap = np.where(integer_x > integer_y, a - b, b - a)
        absolute, x, y = (array.astype(np.float64) for array in (gap, integer_x, integer_y))
    with np.errstate(all="ignore"):
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
    relative[absolute == 0] = 0.0
    relative[np.isinf(absolute)] = np.inf
    return absolute, relative


def tensor_difference(name: str, stretches: Iterable[tuple[Bits, Bits]], dtype: str) -> TensorDifference:
    """Compare two tensors of one dtype that come as pairs of equally long stretches, a block at a time."""
    elements = differing = 0
    absolute = relative = 0.0
    for a, b in stretches:
        elements += a.size
        for begin in range(0, a.size, _BLOCK):
            block_a, block_b = a[begin : begin + _BLOCK], b[begin : begin + _BLOCK]
            differs = block_a != block_b
            if count := int(np.count_nonzero(differs)):
                distances, shares = distance(block_a[differs], block_b[differs], dtype)
                differing += count
                absolute, relative = max(absolute, float(distances.max())), max(relative, float(shares.max()))
    return TensorDifference(name, elements, differing, absolute, relative)


def _settled(a: CheckpointManifest, b: CheckpointManifest, name: str) -> bool:
    """Whether the digests prove that a tensor is the same in both."""
    return a.digest_function == b.digest_function and a.tensors[name].digest == b.tensors[name].digest


def _measure_all(
    first: OpenCheckpoint, second: OpenCheckpoint, names: list[str], progress: Callable[[int, int], None] | None
) -> tuple[TensorDifference, ...]:
    """Measure these tensors; return those that differ, weights and the largest distances first."""
    tensors, limit = first.manifest.tensors, band_bytes(first, second)
    total, done = sum(math.prod(tensors[name].shape) * DTYPES[tensors[name].dtype][1] for name in names), 0

    def band_pairs(name: str) -> Iterator[tuple[Bits, Bits]]:
        nonlocal done
        for a, b in zip(read_bands(first, name, limit), read_bands(second, name, limit), strict=True):
            yield a, b
            done += a.nbytes
            if progress is not None:
                progress(done, total)

    differences = (tensor_difference(name, band_pairs(name), tensors[name].dtype) for name in names)
    return tuple(
        sorted(
            (difference for difference in differences if difference.differing),
            key=lambda tensor: (not tensor.name.startswith("model/"), -tensor.absolute, -tensor.relative, tensor.name),
        )
    )


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, with both values; None for a missing key."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


@lru_cache(maxsize=1)
def _e4m3fn() -> Floats:
    """The values of its 256 codes: four bits of exponent, three of mantissa, no infinities and one NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, size, -size)
