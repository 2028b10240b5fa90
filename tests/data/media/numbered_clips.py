"""Videos whose frames carry their numbers as bars of black and white, which survive any codec."""

import io
import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

BITS = 8


def picture(number: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Return a frame: bits of its number as bars, the lowest left; red below, blue above where bars are white."""
    bars = [(number >> bit) & 1 for bit in range(BITS)]
    row = np.array([bars[x * BITS // width] for x in range(width)], np.uint8) * 255
    return np.repeat(np.repeat(row[None, :, None], height, 0), 3, 2)


def number_of(pixels: np.ndarray) -> int:
    """Return the number that a frame [H, W, 3] carries."""
    height, width = pixels.shape[:2]
    middles = [int((bit + 0.5) * width / BITS) for bit in range(BITS)]
    return sum(int(pixels[height // 2, middle].mean() > 127) << bit for bit, middle in enumerate(middles))


def make_video(
    frames: int = 40,
    *,
    format: str = "mp4",
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    size: tuple[int, int] = (64, 48),
    times: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    aspect: Fraction | None = None,
    audio: bool = False,
    pictures: Sequence[np.ndarray] | None = None,
) -> bytes:
    """Encode numbered frames, or `pictures`; `times` are in milliseconds."""
    if (container_options or {}).get("movflags") == "faststart":  # which reads what it wrote
        out: Any = tempfile.NamedTemporaryFile(suffix=".mp4")  # noqa: SIM115
    else:
        out = io.BytesIO()
    chosen = {"g": "12", "threads": "1", "preset": "ultrafast"} if codec == "libx264" else {"g": "12", "threads": "1"}
    with av.open(
        out if isinstance(out, io.BytesIO) else out.name, "w", format=format, options=container_options or {}
    ) as container:
        stream: Any = container.add_stream(codec, rate=25, options={**chosen, **(options or {})})
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        sound: Any = container.add_stream("aac", rate=48000) if audio else None
        for number in range(frames):
            shown = picture(number, *size) if pictures is None else pictures[number]
            frame = av.VideoFrame.from_ndarray(shown, "rgb24" if shown.shape[-1] == 3 else "rgba")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.sample_rate = 48000
            container.mux(sound.encode(silence))
            container.mux(sound.encode())
    out.seek(0)
    return out.read()


def rotated(mp4: bytes, degrees: int) -> bytes:
    """Return an MP4 whose track header says that it is shown turned clockwise by 90, 180 or 270 degrees."""
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    matrix = struct.pack(">9i", cos << 16, sin << 16, 0, -sin << 16, cos << 16, 0, 0, 0, 1 << 30)
    at = mp4.index(b"tkhd") + 4 + 40  # version 0: flags, times, track, duration, reserved, layer, group, volume
    assert mp4[at : at + 4] == struct.pack(">i", 1 << 16)
    return mp4[:at] + matrix + mp4[at + 36 :]
