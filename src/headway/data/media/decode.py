"""Decode the frames of samples from the bytes of a clip.

Frames are RGB, as a viewer shows them: rotated, with square pixels, and composited over white where an image is
transparent. The result depends on the bytes and the samples alone: not on which samples are decoded together.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from headway.data.media.dataset import Clip
from headway.data.media.manifest import Kind
from headway.data.media.specs import SampleSpec
from headway.errors import DamagedData, DataError

if TYPE_CHECKING:
    from av import Packet, VideoFrame, VideoStream
    from av.container import InputContainer
    from av.video.reformatter import VideoReformatter
    from PIL import Image

Pixels = npt.NDArray[np.uint8]
"""[frames, H, W, 3]."""

VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,h264,hevc,ivf,m4v,mjpeg,gif,nut,y4m,yuv4mpegpipe"
"""Containers that are read: those that name other files or addresses are not."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MOST_PIXELS = 1 << 28
"""A larger image is taken for an attack on memory."""
UNREFERENCED = ("h264", "mpeg4", "mpeg2video")
"""Codecs whose frames say for sure that no other frame needs them, so that their decoder can leave them out."""

SCALING = 32 | 0x2000 | 0x40000 | 0x80000
"""How libswscale scales: averaging areas, with full chroma, rounded accurately; the same bits on any processor."""


EMPTY = "it is empty"
UNKNOWN = "it is damaged, or of an unknown format"


class Undecodable(DamagedData):
    """A clip's bytes cannot be decoded as its index says."""


def decode_samples(kind: Kind, content: memoryview | bytes, clip: Clip, specs: Sequence[SampleSpec]) -> list[Pixels]:
    """Return the pixels of samples of one clip; frames that several samples need are decoded once."""
    if kind == "image":
        return [_image_sample(content, clip, spec) for spec in specs]
    return decode_video(content, clip, specs)


def need(package: str) -> Any:
    """Import a package of the media extra; raise DataError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        name = {"PIL.Image": "pillow"}.get(package, package)
        raise DataError(
            f"images and video need the {name} package, which is not installed", hint="pip install 'headway[media]'"
        ) from None


# -- images


def open_image(content: memoryview | bytes) -> "Image.Image":
    """Decode an image as it is shown, in RGB; raise Undecodable."""
    image_module = need("PIL.Image")
    from PIL import ImageOps

    if not len(content):
        raise Undecodable(EMPTY)
    try:
        with image_module.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Undecodable(f"it has {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}")
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError) as error:
        raise Undecodable(image_reason(error)) from None


def image_reason(error: Exception) -> str:
    """Return why Pillow cannot decode an image, whose own words say which of its parts met what."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, Image.DecompressionBombError) or getattr(error, "errno", None):
        return reason_of(error)
    if isinstance(error, UnidentifiedImageError):
        return UNKNOWN
    if "not available" in str(error):  # a codec that this Pillow was built without
        return reason_of(error)
    return "it is cut short" if "truncated" in str(error).lower() else "it is damaged"


def _as_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I;16"):  # convert() would clip 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise Undecodable(f"its pixels are of mode {image.mode}, whose range is not known")
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        white = Image.new("RGBA", shown.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, shown).convert("RGB")
    return image.convert("RGB")


def _image_sample(content: memoryview | bytes, clip: Clip, spec: SampleSpec) -> Pixels:
    from PIL import Image

    image = open_image(content)
    if (image.width, image.height) != (clip.width, clip.height):
        raise Undecodable(f"it has {image.width} x {image.height} pixels, not the {clip.width} x {clip.height} indexed")
    if image.size != spec.resize:
        image = image.resize(spec.resize, Image.Resampling.BICUBIC)
    return _cut(np.asarray(image)[None], spec)


def _cut(frames: Pixels, spec: SampleSpec) -> Pixels:
    (left, top), (width, height) = spec.crop, spec.size
    cut = frames[:, top : top + height, left : left + width]
    return np.ascontiguousarray(cut[:, :, ::-1] if spec.flip else cut)


# -- video


@contextmanager
def open_video(content: memoryview | bytes) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """Open the bytes of a video and the stream to decode; nothing that they name is ever opened. Raise Undecodable."""
    av = need("av")
    if not len(content):
        raise Undecodable(EMPTY)
    options = {"format_whitelist": VIDEO_FORMATS, "protocol_whitelist": "none"}
    try:
        container: InputContainer = av.open(io.BytesIO(content), options=options, metadata_errors="replace")
    except av.error.InvalidDataError:
        raise Undecodable(UNKNOWN) from None
    except (av.FFmpegError, ValueError, OSError) as error:
        raise Undecodable(reason_of(error)) from None
    with container:
        stream = container.streams.best("video")
        if stream is None:
            raise Undecodable("it has no video stream")
        if stream.codec_context is None:
            raise Undecodable("no decoder knows its codec")
        stream.codec_context.thread_count = 1
        yield container, cast("VideoStream", stream)


def decode_video(content: memoryview | bytes, clip: Clip, specs: Sequence[SampleSpec]) -> list[Pixels]:
    """Return the pixels of samples of a video; raise Undecodable."""
    av = need("av")
    wanted = sorted({frame for spec in specs for frame in range(spec.start, spec.end, spec.stride)})
    if not 0 <= wanted[0] <= wanted[-1] < clip.frames:
        raise DataError(f"clip {clip.number} ({clip.name}) has {clip.frames} frames, not a frame {wanted[-1]}")
    out = [np.empty((spec.frames, spec.size[1], spec.size[0], 3), dtype=np.uint8) for spec in specs]
    # each keeps the tables of its size
    scalers = {spec.resize: av.video.reformatter.VideoReformatter() for spec in specs}
    try:
        for number, frame in read_frames(content, clip, wanted):
            scaled: dict[tuple[int, int], Pixels] = {}
            for spec, pixels in zip(specs, out, strict=True):
                place, rest = divmod(number - spec.start, spec.stride)
                if not rest and 0 <= place < spec.frames:
                    if spec.resize not in scaled:
                        scaled[spec.resize] = shown(frame, clip.rotation, spec.resize, scalers[spec.resize])
                    pixels[place] = _cut(scaled[spec.resize][None], spec)[0]
    except (av.FFmpegError, ValueError) as error:
        raise Undecodable(f"{clip.name}: {reason_of(error)}") from None
    return out


def shown(frame: "VideoFrame", rotation: int, size: tuple[int, int], scaler: "VideoReformatter") -> Pixels:
    """Return a frame in RGB, scaled to (width, height) as shown.

    libswscale writes planes of RGB in a third of the time that interleaved pixels take it, with the same bits.
    """
    width, height = size if rotation % 180 == 0 else size[::-1]
    pixels = scaler.reformat(frame, width, height, "gbrp", interpolation=SCALING).to_ndarray().view(np.uint8)
    return pixels if not rotation else np.rot90(pixels, -(rotation // 90))


def read_frames(content: memoryview | bytes, clip: Clip, wanted: Sequence[int]) -> Iterator[tuple[int, "VideoFrame"]]:
    """Yield the frames of ascending numbers, decoding from the keyframe before each gap."""
    if not len(clip.keyframes):
        yield from _counted(content, set(wanted))
        return
    with ExitStack() as opened:
        container, stream = opened.enter_context(open_video(content))
        for turn, (keyframe, numbers) in enumerate(_ranges(clip, wanted)):
            packets = _packets_from(container, stream, clip, keyframe)
            if packets is None:
                if turn or keyframe:  # it has been read or sought in: begin again
                    opened.close()
                    container, stream = opened.enter_context(open_video(content))
                packets = container.demux(stream)
            left = {int(clip.times[number]): number for number in numbers}
            for frame in _decode(packets, clip, left):
                assert frame.pts is not None, "it was looked up by its timestamp"
                yield left.pop(frame.pts), frame
            if left:
                raise Undecodable(f"{clip.name}: frame {min(left.values())} is not where the index says")


def _ranges(clip: Clip, wanted: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the wanted frames of each range that is decoded without a gap, after the number of its first keyframe."""
    ranges: list[tuple[int, list[int]]] = []
    last = -2
    for number, keyframe in zip(wanted, np.searchsorted(clip.keyframes, wanted, side="right") - 1, strict=True):
        if keyframe > last + 1:
            ranges.append((int(keyframe), []))
        ranges[-1][1].append(number)
        last = int(keyframe)
    return ranges


def _packets_from(
    container: "InputContainer", stream: "VideoStream", clip: Clip, keyframe: int
) -> "Iterator[Packet[VideoStream]] | None":
    """Seek to a keyframe; return the packets from there, or from an earlier one on; None if that is not possible."""
    target = int(clip.times[clip.keyframes[keyframe]])
    for earlier in range(keyframe, max(keyframe - 4, 0), -1):
        # Where a seek leads is the demuxer's business (some go by decoding times), so the packet there is checked.
        container.seek(int(clip.times[clip.keyframes[earlier]]), stream=stream)
        packets = container.demux(stream)
        first = next(packets, None)
        if first is not None and first.is_keyframe and first.pts is not None and first.pts <= target:
            return chain([first], packets)
    return None


def _decode(packets: "Iterable[Packet[VideoStream]]", clip: Clip, wanted: dict[int, int]) -> "Iterator[VideoFrame]":
    """Yield the frames with wanted timestamps; the caller removes them from `wanted`."""
    for packet in packets:
        context = packet.stream.codec_context
        if context.name in UNREFERENCED:
            # A packet with another timestamp may be the second half of a frame that is wanted.
            spare = packet.pts is not None and packet.pts not in wanted and _is_time(clip, packet.pts)
            context.skip_frame = "NONREF" if spare else "DEFAULT"
        for frame in packet.decode():
            if frame.pts in wanted:
                yield frame
        if not wanted:
            return


def _is_time(clip: Clip, time: int) -> bool:
    """Return whether a timestamp is that of a frame."""
    place = int(np.searchsorted(clip.times, time))
    return place < clip.frames and int(clip.times[place]) == time


def _counted(content: memoryview | bytes, wanted: set[int]) -> "Iterator[tuple[int, VideoFrame]]":
    """Yield wanted frames of a video without usable timestamps."""
    with open_video(content) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                yield number, frame
            if number >= max(wanted):
                return


def reason_of(error: BaseException) -> str:
    """Return what a decoder says, in lower case and without what it says of the file's name."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = text.splitlines()[0].split(": <none>")[0]
    return text[:1].lower() + text[1:]
