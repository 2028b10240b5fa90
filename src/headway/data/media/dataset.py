"""Open a dataset of images or video: its manifest, its index, and the bytes of its clips as read-only memory maps."""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.manifest import MANIFEST
from headway.data.media.manifest import PARTS, RECORD, Kind, MediaManifest, read_media_manifest
from headway.data.shards import Verify, check_content
from headway.errors import DamagedData, DataError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Clip:
    """What the index knows of one image or video."""

    number: int
    name: str
    """Its path below the folder that it was read from."""
    source: str
    """What it was cut from; by default its name."""
    codec: str
    captions: tuple[str, ...]
    label: int | None
    shard: int
    offset: int
    bytes: int
    sha256: str
    width: int
    """As shown: after rotation, with square pixels."""
    height: int
    frames: int
    rotation: int
    """Degrees, clockwise, that were applied."""
    duration_s: float
    fps: float
    keyframes: Ints
    """Numbers of the frames that decoding can begin at, ascending from 0."""
    offsets: Ints
    """Where they are in the file, in bytes; -1: unknown."""
    times: Ints
    """Timestamp of each frame, in the stream's unit."""


@dataclass(frozen=True)
class MediaIndex:
    """What the order of samples depends on, as columns over all clips."""

    version: str
    kind: Kind
    width: Ints
    height: Ints
    frames: Ints
    source: npt.NDArray[np.uint64]
    """Equal for clips of one source."""
    captions: Ints
    """How many captions each clip has."""
    keyframes: Ints
    """Frame numbers of the keyframes of all clips, one clip after another."""
    keyframes_end: Ints
    """Where each clip's end in `keyframes`."""

    def __len__(self) -> int:
        return len(self.width)

    def keyframes_of(self, clip: int) -> Ints:
        """Return the frame numbers of a clip's keyframes."""
        return self.keyframes[int(self.keyframes_end[clip - 1]) if clip else 0 : int(self.keyframes_end[clip])]


@dataclass(frozen=True)
class MediaDataset:
    """An open dataset of images or video."""

    path: Path
    manifest: MediaManifest
    version: str
    records: tuple[npt.NDArray[Any], ...]
    """`RECORD` of each clip, per shard."""

    @property
    def kind(self) -> Kind:
        """Image or video."""
        return self.manifest.kind

    @property
    def clips(self) -> int:
        """Number of clips."""
        return self.manifest.clips

    @functools.cached_property
    def index(self) -> MediaIndex:
        """The columns that the order depends on."""
        lists = [self._keyframes(shard) for shard in range(len(self.records))]
        counts = np.concatenate([count for _, count in lists])
        return MediaIndex(
            version=self.version,
            kind=self.kind,
            width=self.column("width"),
            height=self.column("height"),
            frames=self.column("frames"),
            source=np.concatenate([records["source"] for records in self.records]),
            captions=self.column("captions"),
            keyframes=np.concatenate([numbers for numbers, _ in lists]),
            keyframes_end=np.cumsum(counts),
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column of the index over all clips; whole numbers as int64."""
        column = np.concatenate([records[name] for records in self.records])
        return column if column.dtype.kind == "f" else column.astype(np.int64)

    def _keyframes(self, shard: int) -> tuple[Ints, Ints]:
        """Return the keyframes of all clips of a shard, and how many each has."""
        records = self.records[shard]
        ends, places_ends = records["keyframes_end"].astype(np.int64), records["places_end"].astype(np.int64)
        starts = np.concatenate([[0], places_ends[:-1]])
        counts = ends - starts
        before = np.concatenate([[0], np.cumsum(counts)[:-1]])
        picked = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
        return self.places[shard][picked], counts

    @functools.cached_property
    def contents(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The bytes of each shard's clips."""
        return tuple(_map(self._file(shard, 0), "u1") for shard in range(len(self.records)))

    @functools.cached_property
    def places(self) -> tuple[Ints, ...]:
        """The keyframes and timestamps of each shard."""
        return tuple(_map(self._file(shard, 2), "<i8") for shard in range(len(self.records)))

    @functools.cached_property
    def texts(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The lines of each shard's texts."""
        return tuple(_map(self._file(shard, 3), "u1") for shard in range(len(self.records)))

    def _file(self, shard: int, part: int) -> Path:
        return self.path / self.manifest.files[shard * len(PARTS) + part].name

    def locate(self, number: int) -> tuple[int, int]:
        """Return the shard of a clip, and its place there."""
        if not 0 <= number < self.clips:
            raise DataError(f"there is no clip {number}", hint=f"0 to {self.clips - 1}")
        for shard, records in enumerate(self.records):
            if number < len(records):
                return shard, number
            number -= len(records)
        raise AssertionError("the manifest's counts were checked when the dataset was opened")

    def clip(self, number: int) -> Clip:
        """Return what the index knows of a clip."""
        shard, place = self.locate(number)
        record = self.records[shard][place]
        before = self.records[shard][place - 1] if place else None
        places_begin, text_begin = (0, 0) if before is None else (int(before["places_end"]), int(before["text_end"]))
        keyframes_end, places_end = int(record["keyframes_end"]), int(record["places_end"])
        offsets_end = 2 * keyframes_end - places_begin
        text = json.loads(self.texts[shard][text_begin : int(record["text_end"])].tobytes())
        step, frames = int(record["time_step"]), int(record["frames"])
        places = self.places[shard]
        listed = places[offsets_end:places_end]
        return Clip(
            number=number,
            name=text["name"],
            source=text["source"],
            codec=text["codec"],
            captions=tuple(text["captions"]),
            label=None if record["label"] < 0 else int(record["label"]),
            shard=shard,
            offset=int(record["offset"]),
            bytes=int(record["bytes"]),
            sha256=record["sha256"].tobytes().hex(),
            width=int(record["width"]),
            height=int(record["height"]),
            frames=frames,
            rotation=int(record["rotation"]),
            duration_s=float(record["duration_s"]),
            fps=float(record["fps"]),
            keyframes=places[places_begin:keyframes_end],
            offsets=places[keyframes_end:offsets_end],
            times=listed if not step else int(record["first_time"]) + step * np.arange(frames, dtype=np.int64),
        )

    def captions_of(self, clips: Ints) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and the captions of clips, which ascend: faster than `clip` of each."""
        wanted, first = np.asarray(clips), 0
        for texts, records in zip(self.texts, self.records, strict=True):
            lines = texts.tobytes().splitlines()
            low, high = np.searchsorted(wanted, [first, first + len(records)]).tolist()
            for place in wanted[low:high].tolist():
                text = json.loads(lines[place - first])
                yield text["name"], text["captions"]
            first += len(records)

    def content(self, clip: Clip) -> memoryview:
        """Return the original bytes of a clip."""
        return self.contents[clip.shard][clip.offset : clip.offset + clip.bytes].data

    def labels(self) -> Ints:
        """Return the label of each clip; -1 where it has none."""
        return self.column("label")


def source_key(source: str) -> int:
    """Return the number that stands for a source in the index."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")


def open_media(path: str | Path, verify: Verify = "changed", kind: Kind = "video") -> MediaDataset:
    """Open a dataset; hash the files that changed, all of them (`full`) or none (`sizes`).

    The hint of an error names the `kind`.
    """
    folder = Path(path)
    manifest = read_media_manifest(folder, kind)
    check_content(folder, manifest.files, manifest.version, verify)
    records = []
    for shard, count in enumerate(manifest.clips_per_shard):
        file = manifest.files[shard * len(PARTS) + 1]
        if file.bytes != count * np.dtype(RECORD).itemsize:
            raise DamagedData(f"{folder / MANIFEST} is damaged: its entries for shard {shard} disagree")
        records.append(_map(folder / file.name, RECORD))
    return MediaDataset(folder, manifest, manifest.version, tuple(records))


def _map(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
