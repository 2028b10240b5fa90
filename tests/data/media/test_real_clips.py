"""Four real clips, if they are there: every frame by number is the frame of a decode from the start."""

import io
import random
from pathlib import Path

import av
import numpy as np
import pytest
from test_media_decode import clip_of, in_rgb, sample

from headway.data.media.decode import decode_samples

FOLDER = next(
    (clips for folder in Path(__file__).parents if (clips := folder / "shared/data/media/torchcodec").is_dir()), Path()
)
CLIPS = {
    "av1_video.mkv": (125, 640, 360, "libdav1d"),
    "bt709_full_range.mp4": (30, 1280, 720, "h264"),
    "h265_video.mp4": (10, 128, 128, "hevc"),
    "nasa_13013.mp4": (390, 480, 270, "h264"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_real_clip(name: str) -> None:
    if not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not there")
    content = (FOLDER / name).read_bytes()
    clip = clip_of(content)
    assert (clip.frames, clip.width, clip.height, clip.codec) == CLIPS[name]
    with av.open(io.BytesIO(content)) as container:
        frames = [in_rgb(frame) for frame in container.decode(container.streams.best("video"))]
    for number in random.Random(name).sample(range(clip.frames), 10):
        (pixels,) = decode_samples("video", content, clip, [sample(clip, number)])
        assert np.array_equal(pixels[0], frames[number])
