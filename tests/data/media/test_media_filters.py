"""Sharpness, motion and hashes against other implementations, and near-duplicates against brute force."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_clips import make_video
from PIL import Image, ImageFilter

from headway.data.media.appearance import Observer, hash_distance, perceptual_hash, sharpness
from headway.data.media.examine import examine
from headway.data.media.filters import near_duplicates
from lazy_imports import dct


def test_hash_has_the_bits_of_a_cosine_transform() -> None:
    picture = np.random.default_rng(0).uniform(0, 255, (32, 32))
    low = dct.dctn(picture, type=2)[:8, :8].reshape(-1)
    expected = low > np.median(low[1:])
    value = perceptual_hash(picture)
    assert [(value >> place) & 1 for place in range(1, 64)] == expected[1:].astype(int).tolist()


def test_hash_survives_scaling_and_recompression_but_tells_pictures_apart() -> None:
    seeds = np.random.default_rng(1)
    small = [seeds.integers(0, 256, (6, 8, 3), dtype=np.uint8) for _ in range(2)]
    one, other = (Image.fromarray(pixels).resize((400, 300), Image.Resampling.BICUBIC) for pixels in small)

    def value(image: Image.Image) -> str:
        observer = Observer()
        observer.visit(0, image)
        return observer.appearance().hash

    assert hash_distance(value(one), value(one.resize((200, 150)))) <= 4
    assert hash_distance(value(one), value(other)) > 16


def test_sharpness_falls_with_blur() -> None:
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 256, (60, 80), dtype=np.uint8))
    values = [sharpness(np.asarray(picture.filter(ImageFilter.GaussianBlur(r)), float)) for r in (0, 1, 3)]
    assert values[0] > 10 * values[1] > 100 * values[2] > 0
    ramp = np.add.outer(np.arange(9.0), np.arange(7.0))
    assert sharpness(ramp) == 0
    point = np.zeros((5, 5))
    point[2, 2] = 1
    assert sharpness(point) == np.array([-4, 1, 1, 1, 1, 0, 0, 0, 0]).var()


def test_motion_tells_still_from_moving_video() -> None:
    values = []
    for pictures in ([np.full((48, 64, 3), 90, np.uint8)] * 24, None):
        observer = Observer()
        examine("video", make_video(24, pictures=pictures), observer.visit)
        values.append(observer.appearance().motion)
    assert values[0] < 1 < 10 < values[1]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 12), st.integers(0, 1 << 30))
def test_near_duplicates_are_those_of_brute_force(most: int, seed: int) -> None:
    generator = random.Random(seed)
    hashes: dict[str, str] = {}
    for number in range(60):
        base = int(generator.choice([*hashes.values(), "0"]), 16) if number % 2 else generator.getrandbits(64)
        for _ in range(generator.randrange(16)):
            base ^= 1 << generator.randrange(64)
        hashes[f"{number:02d}"] = f"{base:016x}"
    kept: list[str] = []
    expected = []
    for name, value in hashes.items():
        if any(hash_distance(value, hashes[other]) <= most for other in kept):
            expected.append(name)
        else:
            kept.append(name)
    removed = dict(near_duplicates(hashes, most))
    assert list(removed) == expected
    assert all(other in kept and hash_distance(hashes[name], hashes[other]) <= most for name, other in removed.items())
