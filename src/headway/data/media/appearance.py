"""What a few frames of a clip look like, in numbers that filters use: sharpness, motion, a perceptual hash."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headway.data.media.decode import SCALING

if TYPE_CHECKING:
    from av import VideoFrame

EVERY = 8
"""Every so many frames of a video one is looked at."""
SIDE = 256
"""Frames are scaled to at most so many pixels along an edge, so that sharpness is of what training sees."""
HASH_SIDE = 32
Gray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Appearance:
    """What filters look at."""

    sharpness: float
    """Variance of the Laplacian of gray levels (0 to 255), the median over frames; blurred pictures have little."""
    motion: float
    """Mean change of gray levels between frames that are looked at; 0 for images."""
    hash: str
    """Perceptual hash of the middle frame: 16 hex digits."""


@dataclass
class Observer:
    """Looks at frames while they are decoded."""

    _sharpness: list[float] = field(default_factory=list)
    _small: list[Gray] = field(default_factory=list)

    def visit(self, number: int, frame: Any) -> None:
        """Look at a frame of PyAV, or an image of PIL."""
        if number % EVERY:
            return
        if hasattr(frame, "reformat"):
            gray, small = _gray_frame(frame, SIDE), _gray_frame(frame, HASH_SIDE, HASH_SIDE)
        else:
            gray, small = _gray_image(frame, SIDE), _gray_image(frame, HASH_SIDE, HASH_SIDE)
        self._sharpness.append(sharpness(gray))
        self._small.append(small)

    def appearance(self) -> Appearance:
        """Return what was seen."""
        changes = [np.abs(after - before).mean() for before, after in zip(self._small, self._small[1:], strict=False)]
        return Appearance(
            sharpness=round(float(np.median(self._sharpness)), 3),
            motion=round(float(np.mean(changes)), 3) if changes else 0.0,
            hash=f"{perceptual_hash(self._small[len(self._small) // 2]):016x}",
        )


def _fitted(width: int, height: int, side: int) -> tuple[int, int]:
    """Return a size of the same shape with edges of at most `side`."""
    scale = min(1.0, side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _gray_frame(frame: "VideoFrame", side: int, exactly: int | None = None) -> Gray:
    width, height = (exactly, exactly) if exactly else _fitted(frame.width, frame.height, side)
    return frame.reformat(width, height, "gray", interpolation=SCALING).to_ndarray().astype(np.float64)


def _gray_image(image: Any, side: int, exactly: int | None = None) -> Gray:
    size = (exactly, exactly) if exactly else _fitted(image.width, image.height, side)
    return cast(Gray, np.asarray(image.convert("L").resize(size), dtype=np.float64))


def sharpness(gray: Gray) -> float:
    """Return the variance of the Laplacian; 0 for pictures of less than 3 pixels along an edge."""
    if min(gray.shape) < 3:
        return 0.0
    around = gray[:-2, 1:-1] + gray[2:, 1:-1] + gray[1:-1, :-2] + gray[1:-1, 2:]
    return float((around - 4 * gray[1:-1, 1:-1]).var())


def perceptual_hash(small: Gray) -> int:
    """Return 64 bits: which of the lowest frequencies of a 32 x 32 picture are above their median.

    The frequencies are of the discrete cosine transform, the mean (0, 0) is left out of the median and its bit is 0.
    """
    size = len(small)
    steps = np.arange(size)
    basis = np.cos(np.pi * np.outer(np.arange(8), 2 * steps + 1) / (2 * size))
    low = basis @ small @ basis.T
    flat = np.round(low.reshape(-1), 6)
    bits = flat > np.median(flat[1:])
    bits[0] = False
    return int(sum(1 << place for place in np.flatnonzero(bits).tolist()))


def hash_distance(first: str, second: str) -> int:
    """Return in how many bits two hashes differ."""
    return (int(first, 16) ^ int(second, 16)).bit_count()
