"""What decoding a file says of it: size, frames, timestamps, keyframes; and whether it can be decoded at all."""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headway.data.media.decode import Undecodable, need, open_image, open_video, reason_of
from headway.data.media.manifest import Kind
from headway.data.media.writer import ClipFacts

if TYPE_CHECKING:
    from av import VideoFrame

MOST_SIDE = 1 << 15
"""Pixels along an edge; more is taken for an attack on memory."""


def examine(kind: Kind, content: bytes | memoryview, visit: Callable[[int, Any], None] | None = None) -> ClipFacts:
    """Decode a whole file and return its facts; raise Undecodable with the reason.

    `visit` gets the number of each frame and the frame: of an image PIL's, of a video PyAV's.
    """
    return _examine_image(content, visit) if kind == "image" else _examine_video(content, visit)


def _examine_image(content: bytes | memoryview, visit: Callable[[int, Any], None] | None) -> ClipFacts:
    import io

    from PIL import Image

    image = open_image(content)
    with Image.open(io.BytesIO(content)) as raw:
        codec = (raw.format or "").lower()
        rotation = {3: 180, 4: 180, 5: 90, 6: 90, 7: 270, 8: 270}.get(raw.getexif().get(0x0112, 1), 0)
    if visit is not None:
        visit(0, image)
    return ClipFacts(codec, image.width, image.height, rotation, 0.0, 0.0, (0,), (0,), (0,))


def _examine_video(content: bytes | memoryview, visit: Callable[[int, Any], None] | None) -> ClipFacts:
    av = need("av")
    times: list[int | None] = []
    intra: set[int | None] = set()
    places: dict[int, int] = {}
    packets = 0
    first: VideoFrame | None = None
    with open_video(content) as (container, stream):
        try:
            for packet in container.demux(stream):
                packets += packet.size > 0
                if packet.is_keyframe and packet.pts is not None:
                    places[packet.pts] = -1 if packet.pos is None else packet.pos
                if packet.is_corrupt:
                    raise Undecodable(f"it is damaged after {len(times)} frames")
                for frame in packet.decode():
                    if frame.is_corrupt:
                        raise Undecodable(f"frame {len(times)} is damaged")
                    first = first or frame
                    if frame.pict_type == av.video.frame.PictureType.I:
                        intra.add(frame.pts)
                    if visit is not None:
                        visit(len(times), frame)
                    times.append(frame.pts)
        except (av.FFmpegError, ValueError) as error:
            raise Undecodable(f"{reason_of(error)} after {len(times)} frames") from None
        if first is None:
            raise Undecodable("it has no frame")
        if packets < stream.frames:
            raise Undecodable(f"it is cut short: {packets} of {stream.frames} frames are there")
        facts = _video_facts(stream, first, times, intra, places)
        stated = _stated_seconds(container, stream)
        end = (facts.times[-1] * float(stream.time_base or 0) if facts.keyframes else 0.0) + 1 / (facts.fps or 25)
        if facts.keyframes and stated is not None and end < stated - max(2 / (facts.fps or 25), 0.1):
            raise Undecodable(f"it is cut short: {end:.2f} of {stated:.2f} s are there")
        return facts


def _stated_seconds(container: Any, stream: Any) -> float | None:
    """Return where a Matroska file says that the video ends; other formats count frames, or do not know."""
    if not container.format.name.startswith("matroska"):
        return None
    words = stream.metadata.get("DURATION", "").split(":")
    try:
        hours, minutes, seconds = map(float, words)
        return hours * 3600 + minutes * 60 + seconds
    except ValueError:
        pass
    alone = len(container.streams) == 1 and container.duration is not None
    return container.duration / 1_000_000 if alone else None


def _video_facts(
    stream: Any, first: "VideoFrame", times: list[int | None], intra: set[int | None], places: dict[int, int]
) -> ClipFacts:
    known = [time for time in times if time is not None]
    usable = len(known) == len(times) and all(a < b for a, b in pairwise(known))
    if not usable:  # frames are counted from the start instead
        known, places = list(range(len(times))), {}
    numbers = {time: number for number, time in enumerate(known)}
    keyframes = sorted(numbers[time] for time in places if time in numbers and time in intra)
    if keyframes[:1] != [0]:
        keyframes = [0, *keyframes] if usable else []
    seconds = float(stream.time_base) * (known[-1] - known[0]) if usable else 0.0
    fps = (len(known) - 1) / seconds if seconds > 0 else float(stream.average_rate or 0.0)
    rotation = -first.rotation % 360
    if rotation % 90:
        raise Undecodable(f"it is rotated by {rotation} degrees, not by a multiple of 90")
    aspect = stream.sample_aspect_ratio or 1
    width, height = max(1, round(first.width * aspect)), first.height
    if rotation % 180:
        width, height = height, width
    if max(width, height) > MOST_SIDE:
        raise Undecodable(f"its frames are {width} x {height} pixels, more than {MOST_SIDE:,} along an edge")
    return ClipFacts(
        codec=stream.codec_context.name,
        width=width,
        height=height,
        rotation=rotation,
        duration_s=len(known) / fps if fps else 0.0,
        fps=fps,
        times=tuple(known),
        keyframes=tuple(keyframes),
        offsets=tuple(places.get(known[number], -1) for number in keyframes),
    )
