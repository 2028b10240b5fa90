"""Write pixels as pictures and videos: PNG with Pillow, MP4 with PyAV, both optional packages."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import DataError, UsageError

Pixels = npt.NDArray[np.uint8]
GAP = 2
"""Pixels between the pictures of a grid."""
LEAST_SIDE = 64
"""Pictures of a grid are enlarged, by whole factors, to at least so many pixels."""
PICTURE, VIDEO = ".png", ".mp4"
INSTALL = "install the extra: pip install 'headway[media]'"


def grid_of(pixels_NTYXC: Pixels, columns: int | None = None) -> Pixels:
    """Return one picture per frame, [T, Y, X, 3], with the samples in rows; small ones are enlarged."""
    count, frames, height, width, _ = pixels_NTYXC.shape
    factor = max(1, math.ceil(LEAST_SIDE / max(height, width)))
    pixels = pixels_NTYXC.repeat(factor, axis=2).repeat(factor, axis=3)
    height, width = height * factor, width * factor
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    grid = np.full((frames, rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3), 255, dtype=np.uint8)
    for number in range(count):
        row, column = divmod(number, columns)
        top, left = GAP + row * (height + GAP), GAP + column * (width + GAP)
        grid[:, top : top + height, left : left + width] = pixels[number]
    return grid


def write_samples(path: Path, pixels_NTYXC: Pixels, *, columns: int | None = None, fps: int = 8) -> None:
    """Write samples as one grid: a PNG of images, or of the frames of videos side by side; or an MP4."""
    check_suffix(path, video=pixels_NTYXC.shape[1] > 1)
    if path.suffix.lower() == VIDEO:
        write_mp4(path, grid_of(pixels_NTYXC, columns), fps)
        return
    if pixels_NTYXC.shape[1] > 1:  # one row per video
        columns = pixels_NTYXC.shape[1]
        pixels_NTYXC = pixels_NTYXC.reshape(-1, 1, *pixels_NTYXC.shape[2:])
    write_png(path, grid_of(pixels_NTYXC, columns)[0])


def check_suffix(path: Path, *, video: bool) -> None:
    """Raise UsageError for a name that says no format, or a format that does not fit; suffixes may be in any case."""
    suffix = path.suffix.lower()
    if suffix == PICTURE or (suffix == VIDEO and video):
        return
    if suffix == VIDEO:
        raise UsageError(f"{path.name}: the model makes images, not video", hint=f"name a {PICTURE} file")
    raise UsageError(f"{path.name} is neither a {PICTURE} nor a {VIDEO} file", hint=f"for example {path.stem}{PICTURE}")


def write_png(path: Path, pixels_YXC: Pixels) -> None:
    """Write a PNG, atomically."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("writing a PNG needs Pillow", hint=INSTALL) from None

    def write(partial: Path) -> None:
        Image.fromarray(pixels_YXC).save(partial, format="PNG", optimize=True)

    _replace(path, write)


def write_mp4(path: Path, frames_TYXC: Pixels, fps: int) -> None:
    """Write an MP4 (H.264), atomically; odd sizes are cut by a pixel, as the format demands."""
    try:
        import av
    except ImportError:
        raise DataError("writing an MP4 needs PyAV", hint=INSTALL) from None
    height, width = (size - size % 2 for size in frames_TYXC.shape[1:3])

    def write(partial: Path) -> None:
        with av.open(str(partial), "w", format="mp4") as container:
            stream: Any = container.add_stream("libx264", rate=fps, options={"crf": "14", "threads": "1"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame_YXC in frames_TYXC:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_YXC[:height, :width]), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    _replace(path, write)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place, then rename it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
