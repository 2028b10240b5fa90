"""Decoder processes give the samples of the reader in this process, also when they die, hang or run out of memory."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered_clips import make_video, number_of

from eventually import eventually
from headway.data.media import (
    DecoderLimits,
    MediaDataset,
    MediaOptions,
    MediaOrder,
    MediaReader,
    PooledReader,
    build_media,
    media_order,
    open_media,
)
from headway.data.media import decode as decode_module
from headway.data.media.processes import DecoderProcesses, RequestFailed
from headway.errors import DataError
from headway.recipe import Data


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    for number in range(6):
        (folder / f"{number}.mp4").write_bytes(make_video(48, options={"bf": "2", "crf": str(20 + number)}))
    build_media(folder / "data", [folder / "*.mp4"], MediaOptions("video"))
    return folder / "data"


def opened(folder: Path, batch: int = 4, **media: Any) -> tuple[MediaDataset, MediaOrder]:
    dataset = open_media(folder)
    values = {"sizes": "32x24", "frames": 4, "segment": "gop", "samples": 2, "window": 4, "captions": "none", **media}
    data = Data(path=str(folder), kind="video", holdout=0, media=values)
    return dataset, media_order(dataset.index, data, seed=5, batch=batch)


def test_processes_give_the_samples_of_this_process_after_kills(clips: Path) -> None:
    """Decoders are killed between steps, and one is stopped, so that it hangs."""
    dataset, order = opened(clips)
    reader = MediaReader(dataset, order)
    limits = DecoderLimits(request_s=20)
    with PooledReader(dataset, order, processes=2, limits=limits) as pool:
        for step in range(12):
            expected, batch = reader.read(order.numbers(4 * step)), pool.read(4 * step)
            assert np.array_equal(batch.pixels, expected.pixels)
            assert batch.numbers.tolist() == expected.numbers.tolist()
            if step in (2, 6):
                for pid in pool.decoders.pids:
                    os.kill(pid, signal.SIGKILL)
        assert pool.decoders.replaced >= 1


@pytest.mark.slow
def test_a_hung_decoder_is_replaced(clips: Path) -> None:
    dataset, order = opened(clips)
    expected = MediaReader(dataset, order).read(order.numbers(0))
    replaced: list[str] = []

    def with_patience(why: str) -> None:
        replaced.append(why)
        decoders.limits = DecoderLimits(request_s=600)

    with DecoderProcesses(1, DecoderLimits(request_s=600), with_patience) as decoders:
        request = {"dataset": str(dataset.path), "specs": order.specs(order.numbers(0))[:1]}
        first = decoders.submit(request).result()[0]
        (hung,) = decoders.pids
        os.kill(hung, signal.SIGSTOP)
        decoders.limits = DecoderLimits(request_s=0.2)
        second = decoders.submit(request).result()[0]
        assert hung not in decoders.pids
    assert replaced[0] == "gave no answer in time"
    assert np.array_equal(first, expected.pixels[0])
    assert np.array_equal(second, expected.pixels[0])


@pytest.mark.slow
def test_any_step_can_be_read_next(clips: Path) -> None:
    dataset, order = opened(clips)
    reader = MediaReader(dataset, order)
    with PooledReader(dataset, order, processes=1, rows=(1, 3)) as pool:
        for step in (3, 0, 1, 9, 8, 8):
            expected = reader.read(order.numbers(4 * step, (1, 3)))
            assert np.array_equal(pool.read(4 * step).pixels, expected.pixels)
        held = order.specs(order.numbers(0))
        assert np.array_equal(pool.read_specs(held).pixels, reader.read_specs(held).pixels)


def test_groups_of_pictures_are_decoded_once_per_window(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample of a window is in the request of its group."""
    dataset, order = opened(clips)
    pool = PooledReader.__new__(PooledReader)
    pool.dataset, pool.order, pool.rows = dataset, order, (0, 4)
    requests: list[list[Any]] = []

    class Recorded:
        def submit(self, request: dict[str, Any]) -> None:
            requests.append(request["specs"])

    pool._decoders = Recorded()  # type: ignore[assignment]
    pool._request(pool._window_specs(0, 0))
    assert sorted(len(specs) for specs in requests) == [2] * 8  # 4 rows, 4 steps, 2 samples of a group
    for specs in requests:
        assert len({(spec.clip, spec.start // 12) for spec in specs}) == 1
    opened_files: list[int] = []
    frames = decode_module._decode

    def counted(*args: Any) -> Any:
        opened_files.append(1)
        return frames(*args)

    monkeypatch.setattr(decode_module, "_decode", counted)
    clip = dataset.clip(requests[0][0].clip)
    decode_module.decode_samples("video", dataset.content(clip), clip, requests[0])
    assert len(opened_files) == 1


@pytest.mark.slow
def test_memory_is_limited(tmp_path: Path) -> None:
    (tmp_path / "big.mp4").write_bytes(make_video(8, size=(1920, 1080), options={"bf": "0"}))
    build_media(tmp_path / "data", [tmp_path / "*.mp4"], MediaOptions("video"))
    dataset, order = opened(
        tmp_path / "data", batch=1, sizes="1920x1080", segment="clip", samples=1, window=1, frames=8
    )
    limits = DecoderLimits(memory_mb=170)
    with (
        PooledReader(dataset, order, processes=1, ahead=0, limits=limits) as pool,
        pytest.raises(DataError, match=r"sample 0, clip 0 \(big.mp4\): "),
    ):
        pool.read(0)


def test_ctrl_c_does_not_end_a_decoder(clips: Path) -> None:
    """It goes to all processes of a terminal; the parent ends them."""
    request = {"examine": {"name": "0.mp4", "root": str(clips.parent), "bytes": 1, "mtime_ns": 1}, "kind": "video"}
    with DecoderProcesses(1) as decoders:
        first = decoders.submit(request)
        eventually(lambda: decoders.pids)
        os.kill(decoders.pids[0], signal.SIGINT)  # while it starts
        assert first.result()["facts"]["width"] == 64
        os.kill(decoders.pids[0], signal.SIGINT)
        assert decoders.submit(request).result()["facts"]["width"] == 64
        assert decoders.replaced == 0


@pytest.mark.slow
def test_a_request_that_ends_every_process_fails(clips: Path) -> None:
    with DecoderProcesses(1, DecoderLimits(memory_mb=8)) as decoders:  # too little to start Python
        with pytest.raises(RequestFailed, match="3 decoder processes in turn ended with status"):
            decoders.submit({"dataset": str(clips), "specs": []}).result()
        assert decoders.replaced == 3


def test_decoded_samples_carry_their_numbers(clips: Path) -> None:
    """Frames say which they are: the samples are from where the order says."""
    dataset, order = opened(clips, sizes="64x48")
    for spec in order.specs(order.numbers(8)):
        batch = MediaReader(dataset, order).read_specs([spec])
        shown = [number_of(frame) for frame in batch.pixels[0]]
        assert shown == list(range(spec.start, spec.end))


def test_requests_survive_json(clips: Path) -> None:
    from headway.data.media.worker import spec_from_json

    _, order = opened(clips)
    for spec in order.specs(order.numbers(0)):
        assert spec_from_json(json.loads(json.dumps(spec))) == spec
