"""Decoding against frames with known content, PyAV's own full decode, NumPy formulas and files that are broken."""

import io
import random
from fractions import Fraction
from itertools import accumulate
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation
from numbered_clips import make_video, number_of, picture, rotated
from PIL import Image

from headway.data.media.dataset import Clip
from headway.data.media.decode import Undecodable, decode_samples, open_image
from headway.data.media.examine import examine
from headway.data.media.order import cover
from headway.data.media.specs import SampleSpec

VIDEOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "B-frames": {"options": {"bf": "3", "preset": "medium"}},
    "open groups": {"options": {"bf": "3", "preset": "medium", "x264-params": "open-gop=1:keyint=12:scenecut=0"}},
    "interlaced": {"options": {"bf": "2", "preset": "medium", "x264-params": "interlaced=1"}},
    "variable rate": {"times": list(accumulate((20 + 7 * i % 31 for i in range(40)), initial=0))},
    "odd size": {"size": (63, 47), "pix_fmt": "yuv444p"},
    "10 bits": {"pix_fmt": "yuv420p10le"},
    "alpha": {"format": "matroska", "codec": "ffv1", "pix_fmt": "yuva420p"},
    "with audio": {"audio": True},
    "fragmented": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "Matroska": {"format": "matroska", "options": {"bf": "2", "preset": "medium"}},
    "transport stream": {"format": "mpegts", "options": {"bf": "2", "preset": "medium"}},
    "AVI": {"format": "avi", "codec": "mpeg4", "options": {"bf": "2"}},
    "MPEG-2": {"format": "mpegts", "codec": "mpeg2video", "options": {"bf": "2"}},
    "no container": {"format": "h264"},
    "HEVC": {"codec": "libx265", "options": {"x265-params": "log-level=none:keyint=12:pools=1:frame-threads=1"}},
    "VP9": {"format": "webm", "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "Motion JPEG": {"format": "avi", "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "GIF": {"format": "gif", "codec": "gif", "pix_fmt": "rgb8"},
}


def clip_of(content: bytes, kind: Any = "video") -> Clip:
    """What a dataset's index would say of a file."""
    facts = examine(kind, content)
    return Clip(
        number=0, name="clip", source="clip", codec=facts.codec, captions=(), label=None, shard=0, offset=0,
        bytes=len(content), sha256="", width=facts.width, height=facts.height, frames=len(facts.times),
        rotation=facts.rotation, duration_s=facts.duration_s, fps=facts.fps, keyframes=np.array(facts.keyframes),
        offsets=np.array(facts.offsets), times=np.array(facts.times),
    )  # fmt: skip


def sample(clip: Clip, start: int = 0, frames: int = 1, stride: int = 1, **changes: Any) -> SampleSpec:
    size = (clip.width, clip.height)
    spec = SampleSpec(0, 0, start, frames, stride, size, (0, 0), size, flip=False, caption=None, bucket=0)
    return spec._replace(**changes)


def all_frames(content: bytes) -> list[np.ndarray]:
    """Every frame in RGB, decoded from the start in one go."""
    with av.open(io.BytesIO(content)) as container:
        return [in_rgb(frame) for frame in container.decode(video=0)]


def in_rgb(frame: av.VideoFrame, width: int | None = None, height: int | None = None) -> np.ndarray:
    flags = sum(Interpolation[name] for name in ("AREA", "FULL_CHR_H_INT", "ACCURATE_RND", "BITEXACT"))
    return frame.reformat(width, height, "rgb24", interpolation=flags).to_ndarray()


MORE = ("fragmented", "with audio", "Matroska", "MPEG-2", "no container", "HEVC", "VP9", "Motion JPEG", "GIF", "plain")
"""Left to the slow tests."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in MORE else []) for n in VIDEOS])
def test_frames_are_found_by_number(name: str) -> None:
    """Any frame, alone: by the number that it shows, and to the bit as a decode from the start gives it."""
    content = make_video(40, **VIDEOS[name])
    clip, expected = clip_of(content), all_frames(content)
    assert clip.frames == len(expected) == 40
    order = list(range(40))
    random.Random(0).shuffle(order)
    for number in order:
        (pixels,) = decode_samples("video", content, clip, [sample(clip, number)])
        assert number_of(pixels[0]) == number
        assert np.array_equal(pixels[0], expected[number])


@pytest.mark.parametrize("name", ["open groups", "interlaced"])
def test_samples_decoded_together_equal_those_decoded_alone(name: str) -> None:
    content = make_video(40, **VIDEOS[name])
    clip, expected = clip_of(content), all_frames(content)
    generator = random.Random(name)
    for _ in range(6):
        specs = []
        for _ in range(generator.randrange(1, 5)):
            frames, stride = generator.randrange(1, 6), generator.randrange(1, 4)
            start = generator.randrange(40 - (frames - 1) * stride)
            specs.append(sample(clip, start, frames, stride))
        for spec, pixels in zip(specs, decode_samples("video", content, clip, specs), strict=True):
            assert np.array_equal(pixels, np.stack(expected[spec.start : spec.end : spec.stride]))


def test_frames_of_a_variable_rate_are_those_of_the_index() -> None:
    times = VIDEOS["variable rate"]["times"][:40]
    clip = clip_of(make_video(40, times=times))
    seconds = np.diff(clip.times) / np.diff(clip.times)[0] * (times[1] - times[0])
    assert np.allclose(seconds, np.diff(times), atol=1)
    assert clip.fps == pytest.approx(39_000 / (times[39] - times[0]), rel=1e-3)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotated_video_is_shown_upright(degrees: int) -> None:
    corner = picture(1, 64, 48)
    corner[:12, :16] = (250, 20, 20)
    content = make_video(4, pictures=[corner] * 4, options={"crf": "1"})
    turned = rotated(content, degrees)
    clip = clip_of(turned)
    assert (clip.rotation, clip.width, clip.height) == (degrees, *((48, 64) if degrees != 180 else (64, 48)))
    (pixels,) = decode_samples("video", turned, clip, [sample(clip, 2)])
    assert np.array_equal(pixels[0], np.rot90(all_frames(content)[2], -degrees // 90))


def test_pixels_that_are_not_square_become_square() -> None:
    content = make_video(3, aspect=Fraction(4, 3))
    clip = clip_of(content)
    assert (clip.width, clip.height) == (85, 48)
    (pixels,) = decode_samples("video", content, clip, [sample(clip, 1)])
    assert pixels.shape == (1, 48, 85, 3)
    assert number_of(pixels[0]) == 1


def test_ten_bits_are_scaled_to_eight() -> None:
    levels = np.full((72, 64), 512, np.uint16)  # planes of 4:2:0: 48 rows of luma, 24 of both chromas
    levels[:48] = np.linspace(64, 940, 64).astype(np.uint16)
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream: Any = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p10le"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(levels, "yuv420p10le")))
        container.mux(stream.encode())
    clip = clip_of(out.getvalue())
    (pixels,) = decode_samples("video", out.getvalue(), clip, [sample(clip)])
    expected = (levels[0].astype(float) - 64) / 876 * 255
    assert np.abs(pixels[0].astype(float) - expected[None, :, None]).max() <= 2


def test_samples_are_scaled_cut_and_mirrored() -> None:
    content = make_video(3, size=(128, 96))
    clip = clip_of(content)
    resize = cover((128, 96), (32, 32))
    assert resize == (43, 32)
    spec = sample(clip, 1, resize=resize, crop=(5, 0), size=(32, 32))
    plain, mirrored = decode_samples("video", content, clip, [spec, spec._replace(flip=True)])
    assert np.array_equal(plain[0][:, ::-1], mirrored[0])
    with av.open(io.BytesIO(content)) as container:
        frame = list(container.decode(video=0))[1]
    assert np.array_equal(plain[0], in_rgb(frame, 43, 32)[:, 5:37])


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"not a video " * 99, "it is damaged, or of an unknown format"),
    "a playlist of other files": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n", "unknown format"),
    "a list of other files": (b"ffconcat version 1.0\nfile '/etc/hostname'\n", "invalid argument"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_video_is_refused_with_a_reason(name: str) -> None:
    content, reason = BROKEN[name]
    with pytest.raises(Undecodable, match=reason):
        examine("video", content)


@pytest.mark.parametrize(
    ("options", "share", "reason"),
    [
        ({}, 0.5, "it is damaged, or of an unknown format"),  # its index is at its end
        ({"container_options": {"movflags": "faststart"}}, 0.9, "damaged|cut short"),
        ({"format": "matroska"}, 0.5, "it is cut short: .* of 1.60 s are there"),
        ({"format": "webm", "codec": "libvpx-vp9", "options": {"cpu-used": "8"}}, 0.5, "it is cut short"),
    ],
)
def test_a_truncated_video_is_refused(options: dict[str, Any], share: float, reason: str) -> None:
    content = make_video(40, **options)
    assert len(examine("video", content).times) == 40
    with pytest.raises(Undecodable, match=reason):
        examine("video", content[: int(len(content) * share)])


def test_overwritten_bytes_are_noticed() -> None:
    content = make_video(40)
    with pytest.raises(Undecodable):
        examine("video", content[:600] + bytes(200) + content[800:])


def test_a_file_of_sound_only_is_refused() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=48000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.sample_rate = 48000
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    with pytest.raises(Undecodable, match="it has no video stream"):
        examine("video", out.getvalue())


def test_an_unknown_codec_is_refused() -> None:
    content = make_video(3).replace(b"avc1", b"zzz9")
    with pytest.raises(Undecodable, match=r"no decoder knows its codec|unknown format|it has no"):
        examine("video", content)


# -- images

STORED = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3) * 2
ORIENTATIONS = {
    1: STORED,
    2: STORED[:, ::-1],
    3: STORED[::-1, ::-1],
    4: STORED[::-1],
    5: STORED.transpose(1, 0, 2),
    6: np.rot90(STORED, -1),
    7: STORED[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90(STORED, 1),
}


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def shown_image(content: bytes) -> np.ndarray:
    clip = clip_of(content, "image")
    (pixels,) = decode_samples("image", content, clip, [sample(clip)])
    return pixels[0]


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(STORED), "PNG", exif=exif)
    assert np.array_equal(shown_image(content), ORIENTATIONS[orientation])


def test_transparent_pixels_are_shown_over_white() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    share = pixels[..., 3:].astype(float) / 255
    expected = pixels[..., :3] * share + 255 * (1 - share)
    assert np.abs(shown_image(saved(Image.fromarray(pixels), "PNG")) - expected).max() <= 1


def test_a_palette_with_a_transparent_colour_is_shown_over_white() -> None:
    image = Image.new("P", (4, 2), 0)
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putpixel((1, 0), 1)
    shown = shown_image(saved(image, "PNG", transparency=0))
    assert shown[0, 1].tolist() == [0, 200, 0]
    assert shown[0, 0].tolist() == [255, 255, 255]


def test_cmyk_is_converted() -> None:
    inks = np.random.default_rng(1).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    content = saved(Image.fromarray(inks, "CMYK"), "TIFF")
    ink = inks.astype(float) / 255
    expected = 255 * (1 - ink[..., :3]) * (1 - ink[..., 3:])
    assert np.abs(shown_image(content) - expected).max() <= 2


def test_sixteen_bits_are_scaled_to_eight() -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    shown = shown_image(saved(Image.fromarray(levels), "PNG"))
    assert shown[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert (shown[..., 0] == shown[..., 2]).all()


def test_gray_and_odd_sizes_become_rgb() -> None:
    levels = np.arange(21, dtype=np.uint8).reshape(3, 7)
    assert np.array_equal(shown_image(saved(Image.fromarray(levels), "PNG")), np.repeat(levels[..., None], 3, 2))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"hello", "it is damaged, or of an unknown format"),
        (saved(Image.fromarray(np.tile(STORED, (40, 40, 1))), "PNG")[:-300], "^it is (cut short|damaged)$"),
        (saved(Image.fromarray(np.tile(STORED, (40, 40, 1))), "JPEG")[:-300], "^it is cut short$"),
        (saved(Image.new("1", (30_000, 30_000)), "PNG"), "pixels"),
    ],
    ids=["empty", "text", "cut PNG", "cut JPEG", "huge"],
)
def test_a_broken_image_is_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(Undecodable, match=reason):
        examine("image", content)


def test_an_image_is_resized_as_pillow_does() -> None:
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    content = saved(image, "PNG")
    clip = clip_of(content, "image")
    spec = sample(clip, resize=(24, 16), crop=(3, 0), size=(16, 16))
    (pixels,) = decode_samples("image", content, clip, [spec])
    expected = np.asarray(image.resize((24, 16), Image.Resampling.BICUBIC))[:, 3:19]
    assert np.array_equal(pixels[0], expected)
    assert open_image(content).mode == "RGB"
