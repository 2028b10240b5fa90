"""The order of samples against brute force over small indexes made by hand."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.media import MediaIndex, MediaOrder, media_order, sample_spec
from headway.data.media.order import cover, held_out_clips
from headway.errors import DataError
from headway.recipe import Data


def index_of(clips: list[tuple[int, int, int]], *, sources: list[int] | None = None, gop: int = 10) -> MediaIndex:
    """An index of clips of (width, height, frames), with a keyframe every `gop` frames and two captions each."""
    width, height, frames = (np.array(column, dtype=np.int64) for column in zip(*clips, strict=True))
    keyframes = [np.arange(0, count, gop) for count in frames.tolist()]
    return MediaIndex(
        version="0123456789abcdef",
        kind="video",
        width=width,
        height=height,
        frames=frames,
        source=np.array(sources or range(len(clips)), dtype=np.uint64),
        captions=np.full(len(clips), 2),
        keyframes=np.concatenate(keyframes),
        keyframes_end=np.cumsum([len(numbers) for numbers in keyframes]),
    )


def data_of(holdout: float = 0, **media: Any) -> Data:
    return Data(path="clips", kind="video", holdout=holdout, media={"sizes": "16x16", "frames": 4, **media})


def order_of(index: MediaIndex, batch: int = 4, holdout: float = 0, **media: Any) -> MediaOrder:
    return media_order(index, data_of(holdout, **media), seed=3, batch=batch)


def test_every_clip_is_sampled_once_per_epoch() -> None:
    order = order_of(index_of([(64, 64, 30)] * 12), batch=4)
    for epoch in range(3):
        rows = range(12 * epoch, 12 * epoch + 12)
        assert sorted(order.spec(row).clip for row in rows) == list(range(12))
    first, second = ([order.spec(row).clip for row in range(start, start + 12)] for start in (0, 12))
    assert first != second


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(8, 80), st.integers(8, 80), st.integers(1, 60)), min_size=2, max_size=14),
    st.integers(1, 3), st.integers(1, 4), st.sampled_from(["center", "random"]), st.sampled_from(["clip", "gop"]),
)  # fmt: skip
def test_samples_lie_inside_their_clips(
    clips: list[tuple[int, int, int]], stride: int, samples: int, crop: str, segment: str
) -> None:
    sizes = {"sizes": ["16x16", "32x16"], "frames": [1, 4], "stride": stride, "samples": samples}
    order = order_of(index_of(clips), crop=crop, segment=segment, flip=True, **sizes)
    for step in range(6):
        specs = order.specs(order.numbers(4 * step))
        assert len({(spec.size, spec.frames) for spec in specs}) == 1
        for spec in specs:
            width, height, frames = clips[spec.clip]
            last = spec.start + (spec.frames - 1) * stride
            assert 0 <= spec.start <= last < frames
            assert spec.end == last + 1
            assert 0 <= spec.crop[0] <= spec.resize[0] - spec.size[0]
            assert 0 <= spec.crop[1] <= spec.resize[1] - spec.size[1]
            assert spec.caption in (0, 1)
            # The shape is kept to within half a pixel.
            assert abs(spec.resize[0] * height - spec.resize[1] * width) <= max(width, height)
            if segment == "gop" and spec.frames == 4 and frames >= 40:
                ends = [*range(0, frames, 10), frames]
                if stride < 3:  # a group of 10 frames is long enough
                    assert sum(edge in range(spec.start + 1, last + 1) for edge in ends[1:-2]) == 0


def test_a_sample_is_the_same_alone_and_among_others() -> None:
    index = index_of([(64, 64, 30), (64, 32, 50), (32, 64, 9)] * 5)
    media = {"sizes": ["16x16", "32x16", "16x32"], "samples": 2, "window": 4, "crop": "random"}
    order = order_of(index, **media)
    numbers = order.numbers(16) + order.numbers(160)
    together = order.specs(numbers)
    assert together == [order.spec(number) for number in numbers]
    assert together[1] == sample_spec(index, data_of(**media), 3, numbers[1], batch=4)


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_share_a_step_without_changing_it(workers: int) -> None:
    order = order_of(index_of([(64, 64, 30), (64, 32, 50)] * 6), batch=8, sizes=["16x16", "32x16"], frames=[2, 4])
    share = 8 // workers
    for step in range(5):
        parts = [order.numbers(8 * step, (share * w, share * w + share)) for w in range(workers)]
        assert [number for part in parts for number in part] == order.numbers(8 * step)
        assert len({len(part) for part in parts}) == 1  # equal work


def test_rows_have_equal_tokens_when_sizes_divide() -> None:
    order = order_of(index_of([(64, 64, 40), (64, 64, 3)] * 8), sizes=["32x32"], frames=[2, 8])
    seen = Counter()
    for step in range(40):
        specs = order.specs(order.numbers(4 * step))
        assert sum(spec.size[0] * spec.size[1] * spec.frames for spec in specs) == 4 * 32 * 32 * 8
        seen[specs[0].frames] += 1
    # 8 clips each: a long one is a row, four short ones are.
    assert seen == {8: 32, 2: 8}


def test_an_epoch_of_every_bucket_takes_each_segment_its_samples() -> None:
    index = index_of([(64, 64, 40), (64, 64, 3)] * 8)
    order = order_of(index, batch=2, frames=[2, 8], sizes="32x32", samples=2)
    assert order.rows_per_epoch == 16 + 4
    counts = Counter(spec.clip for step in range(10) for spec in order.specs(order.numbers(2 * step)))
    assert set(counts.values()) == {2}
    assert len(counts) == 16


def test_samples_of_a_segment_stay_in_one_row_and_window() -> None:
    index = index_of([(64, 64, 100)] * 40)
    order = order_of(index, batch=4, segment="gop", samples=2, window=4)
    where: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for step in range(200):  # 40 clips of 10 groups, two samples each: one epoch
        for row, spec in enumerate(order.specs(order.numbers(4 * step))):
            where.setdefault((spec.clip, spec.start // 10), []).append((row, step))
    assert len(where) == 400
    apart = 0
    for places in where.values():
        (row, step), (other_row, other_step) = places
        assert row == other_row
        assert step // 4 == other_step // 4
        apart += abs(step - other_step) > 1
    assert apart > 50  # mixed within the window


def test_samples_spread_over_their_segment() -> None:
    order = order_of(index_of([(16, 16, 103)] * 10), batch=1, samples=10, placement="spread")
    starts: dict[int, list[int]] = {}
    for number in range(100):
        spec = order.spec(number)
        starts.setdefault(spec.clip, []).append(spec.start // 10)
    assert all(sorted(tenths) == list(range(10)) for tenths in starts.values())


def test_adjacent_samples_follow_each_other() -> None:
    index = index_of([(16, 16, 100)] * 10)
    starts: dict[int, list[int]] = {}
    order = order_of(index, batch=1, samples=3, placement="adjacent", stride=2)
    for number in range(30):
        spec = order.spec(number)
        starts.setdefault(spec.clip, []).append(spec.start)
    assert len({min(places) for places in starts.values()}) > 5
    for places in starts.values():
        assert np.diff(sorted(places)).tolist() == [7, 7]
    short = order_of(index_of([(16, 16, 12)] * 3), batch=1, samples=4, placement="adjacent")
    assert all(0 <= short.spec(number).start <= 8 for number in range(12))


def test_held_out_clips_share_no_source_with_training() -> None:
    index = index_of([(32, 32, 20)] * 60, sources=[number // 3 for number in range(60)])
    order = order_of(index, holdout=0.2)
    away = {spec.clip for batch in order.held_out(100, 8) for spec in batch}
    trained = {order.spec(number).clip for number in range(48)}
    assert len(away) == 12
    assert len(trained) == 48
    assert {clip // 3 for clip in away}.isdisjoint(clip // 3 for clip in trained)
    assert held_out_clips(index, 0.2).sum() == 12


def test_held_out_samples_depend_on_no_seed() -> None:
    index = index_of([(32, 32, 20)] * 20)
    one, other = (media_order(index, data_of(0.3, crop="random"), seed, batch=4) for seed in (1, 2))
    assert one.held_out(10, 4) == other.held_out(10, 4)
    assert [spec.number for batch in one.held_out(5, 2) for spec in batch] == list(range(5))


def test_clips_go_to_the_nearest_shape_that_needs_no_enlarging() -> None:
    sizes = ["64x64", "32x32", "64x32", "128x64"]
    clips = [(100, 100, 9), (40, 40, 9), (200, 100, 9), (100, 50, 9), (20, 20, 9), (30, 10, 9)]
    order = order_of(index_of(clips), batch=1, sizes=sizes)
    shapes = {order.spec(n).clip: order.spec(n).size for n in range(400) if n % order.samples_per_number == 0}
    assert shapes == {0: (64, 64), 1: (32, 32), 2: (128, 64), 3: (64, 32), 4: (32, 32), 5: (64, 32)}


def test_scaled_clips_cover_the_sample() -> None:
    assert cover((1280, 720), (64, 64)) == (114, 64)
    assert cover((720, 1280), (64, 64)) == (64, 114)
    assert cover((10, 10), (64, 32)) == (64, 64)
    assert cover((33, 33), (33, 33)) == (33, 33)


def test_clips_that_are_too_short_are_counted() -> None:
    assert order_of(index_of([(32, 32, 3), (32, 32, 4)])).too_short == 1
    with pytest.raises(DataError, match="no clip has the 7 frames of a sample: the longest has 4"):
        order_of(index_of([(32, 32, 3), (32, 32, 4)]), stride=2)


def test_missing_captions_are_named() -> None:
    index = index_of([(32, 32, 9)] * 3)
    index.captions[1] = 0
    with pytest.raises(DataError, match="1 clip of 3 have no caption, the first is number 1"):
        order_of(index)
    assert order_of(index, captions="none").spec(0).caption is None


def test_a_dataset_of_another_kind_is_refused() -> None:
    data = Data(path="x", kind="image", media={"sizes": "16x16"})
    with pytest.raises(DataError, match=r"data.kind is image, but the dataset holds data of kind video"):
        media_order(index_of([(32, 32, 9)]), data, 1, 1)
