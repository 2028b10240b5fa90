"""Useful frames per CPU-second of the media reader, against PyAV reads of each sample by itself.

    python benchmarks/media_loader.py [--gops N] [--folder DIR] [--baseline-every N]

Every clip is one group of pictures: 250 frames of 1280 x 720, H.264 as x264 makes it by default. An epoch has two
samples of 16 frames per clip, one after the other (`--placement spread`: one in each half), scaled to 455 x 256 and cut
to 256 x 256. Both sides decode the samples of the epoch in its order and must give the same bits. The baseline opens
the clip, seeks, decodes with one thread up to the sample's last frame, and scales the sample's frames; it is what a
data set of clips does in `__getitem__`, here in as many forked processes. Its reads do not depend on each other, so it
may read every N-th step only (`--baseline-every`). Frames are useful if a sample has them. CPU time is that of this
process and of its decoders, their start included.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import platform
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np

from headway.data.media import (
    DecoderLimits,
    MediaDataset,
    MediaOptions,
    MediaOrder,
    PooledReader,
    SampleSpec,
    build_media,
    in_processes,
    media_order,
    open_media,
)
from headway.data.media.decode import SCALING
from headway.recipe import Data

GOP, FRAMES, WIDTH, HEIGHT = 250, 16, 1280, 720
ENCODED = 8
"""Different clips; more are copies of them with other metadata, so that their bytes differ."""


def scene(number: int) -> np.ndarray:
    """Return a large picture with detail at every scale, which a clip pans over."""
    generator = np.random.default_rng(number)
    out = np.zeros((HEIGHT + 300, WIDTH + 560, 3))
    for scale in (4, 16, 64, 256):
        small = generator.normal(size=(out.shape[0] // scale + 2, out.shape[1] // scale + 2, 3))
        out += np.kron(small, np.ones((scale, scale, 1)))[: out.shape[0], : out.shape[1]] * scale**0.4
    return np.clip(128 + 14 * out, 0, 255).astype(np.uint8)


def encode(path: Path, number: int, preset: str) -> None:
    """Write a clip of one group of pictures: a pan, and two patches that move on their own."""
    background, patch = scene(number), scene(number + 1000)[:200, :200]
    options = {"g": str(GOP), "keyint_min": str(GOP), "sc_threshold": "0", "preset": preset, "crf": "23"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, 25)
        for t in range(GOP):
            frame = background[t : t + HEIGHT, 2 * t : 2 * t + WIDTH].copy()
            x, y = (7 * t + 90 * number) % (WIDTH - 200), (3 * t) % (HEIGHT - 200)
            frame[y : y + 200, x : x + 200] = patch
            frame[HEIGHT - y - 200 : HEIGHT - y, WIDTH - x - 200 : WIDTH - x] = patch[::-1]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())


def copy_with_title(source: Path, path: Path, title: str) -> None:
    """Write the same packets with another title."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        new.metadata["title"] = title
        for packet in old.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                new.mux(packet)


def make_clips(folder: Path, gops: int, preset: str) -> None:
    """Write the files that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with forked(ENCODED) as pool:
        for wave in (range(min(gops, ENCODED)), range(ENCODED, gops)):
            list(pool.map(partial(make_clip, folder, preset), wave))


def make_clip(folder: Path, preset: str, number: int) -> None:
    """Write a clip if it is not there."""
    path, first = folder / f"{number:04d}.mp4", folder / f"{number % ENCODED:04d}.mp4"
    if not path.exists():
        unfinished = path.with_name(f"partial-{number}.mp4")
        encode(unfinished, number, preset) if number < ENCODED else copy_with_title(first, unfinished, path.stem)
        unfinished.replace(path)


def forked(processes: int) -> ProcessPoolExecutor:
    """Return processes that need not import anything."""
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))


def read_alone(dataset: MediaDataset, spec: SampleSpec) -> np.ndarray:
    """The baseline."""
    clip = dataset.clip(spec.clip)
    out = np.empty((spec.frames, spec.size[1], spec.size[0], 3), np.uint8)
    times = {int(clip.times[spec.start + index]): index for index in range(spec.frames)}
    (left, top), (width, height) = spec.crop, spec.size
    with av.open(io.BytesIO(dataset.content(clip))) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        container.seek(min(times), stream=stream)
        for frame in container.decode(stream):
            if frame.pts in times:
                small = frame.reformat(*spec.resize, "rgb24", interpolation=SCALING).to_ndarray()
                out[times.pop(frame.pts)] = small[top : top + height, left : left + width]
                if not times:
                    return out
    raise AssertionError("every frame is there")


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def headway(dataset: MediaDataset, order: MediaOrder, steps: range, processes: int) -> tuple[float, float, list[bytes]]:
    """Return CPU seconds, seconds and a hash of each step's pixels of the pooled reader."""
    hashes, before, began = list[bytes](), cpu_s(), time.monotonic()
    with PooledReader(dataset, order, processes=processes, limits=DecoderLimits(request_s=600)) as pool:
        for step in steps:
            hashes.append(hashlib.sha256(pool.read(step * order.batch).pixels.data).digest())
    return cpu_s() - before, time.monotonic() - began, hashes


def baseline(
    dataset: MediaDataset, order: MediaOrder, steps: range, processes: int
) -> tuple[float, float, list[bytes]]:
    """Return the same of reads of each sample by itself."""
    before, began = cpu_s(), time.monotonic()
    with forked(processes) as pool:
        hashes = list(pool.map(partial(read_step, dataset, order), steps))
    return cpu_s() - before, time.monotonic() - began, hashes


def read_step(dataset: MediaDataset, order: MediaOrder, step: int) -> bytes:
    """Return a hash of a step's pixels."""
    content = hashlib.sha256()
    for spec in order.specs(order.numbers(step * order.batch)):
        content.update(read_alone(dataset, spec).data)
    return content.digest()


def row(useful: int, cpu: float, wall: float) -> dict[str, float]:
    """Return the figures of one side."""
    return {"cpu_s": round(cpu, 2), "frames_per_cpu_s": round(useful / cpu, 1), "wall_s": round(wall, 1)}


def main() -> None:
    """Make the clips, run both sides, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gops", type=int, default=48)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "headway-media-loader"))
    parser.add_argument("--preset", default="medium", help="of x264; medium is its default")
    parser.add_argument("--placement", default="adjacent", choices=("adjacent", "spread"), help="data.media.placement")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--baseline-every", type=int, default=1, metavar="N", help="steps of the baseline")
    given = parser.parse_args()
    make_clips(given.folder / f"clips-{given.preset}", given.gops, given.preset)
    listed = [given.folder / f"clips-{given.preset}" / f"{number:04d}.mp4" for number in range(given.gops)]
    out = given.folder / f"data-{given.preset}-{given.gops}"
    build_media(out, listed, MediaOptions("video"), examine=in_processes(given.processes))
    dataset = open_media(out)
    media = {"sizes": "256x256", "frames": FRAMES, "segment": "gop", "samples": 2, "captions": "none"}
    media["placement"] = given.placement
    order = media_order(dataset.index, Data(path=str(out), kind="video", holdout=0, media=media), seed=1, batch=4)
    steps = range(order.rows_per_epoch // order.batch)
    some = steps[:: given.baseline_every]
    ours, ours_wall, ours_hashes = headway(dataset, order, steps, given.processes)
    theirs, theirs_wall, theirs_hashes = baseline(dataset, order, some, given.processes)
    assert [ours_hashes[step] for step in some] == theirs_hashes, "both sides decode the same samples"
    per_step = order.batch * FRAMES
    result = {
        "gops": given.gops,
        "samples": len(steps) * order.batch,
        "useful_frames": len(steps) * per_step,
        "preset": given.preset,
        "placement": given.placement,
        "processes": given.processes,
        "machine": platform.machine(),
        "pyav": av.__version__,
        "headway": row(len(steps) * per_step, ours, ours_wall),
        "pyav_per_clip": {"steps": f"{len(some)} of {len(steps)}"} | row(len(some) * per_step, theirs, theirs_wall),
        "ratio": round(theirs / len(some) / (ours / len(steps)), 3),
        "same_bits": True,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
