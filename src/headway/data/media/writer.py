"""Write the shards of a dataset of images or video (format 3)."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.data.manifest import MANIFEST, stamp_of, write_stamp
from headway.data.media.dataset import source_key
from headway.data.media.manifest import PARTS, RECORD, Kind, MediaFile, MediaManifest, media_shard_name
from headway.data.writer import HashedFile, write_file
from headway.errors import DamagedData


@dataclass(frozen=True)
class ClipFacts:
    """What decoding a file says of it."""

    codec: str
    width: int
    """As shown: after rotation, with square pixels."""
    height: int
    rotation: int
    """Degrees, clockwise, that were applied."""
    duration_s: float
    fps: float
    times: tuple[int, ...]
    """Timestamp of each frame, in the stream's unit."""
    keyframes: tuple[int, ...]
    """Frame numbers; none if timestamps are not usable, so that frames are counted from the start."""
    offsets: tuple[int, ...]
    """Their places in the file, in bytes; -1: unknown."""

    @property
    def time_step(self) -> int:
        """The distance of all timestamps, or 0 if they differ."""
        if len(self.times) == 1:
            return 1
        steps = {after - before for before, after in zip(self.times, self.times[1:], strict=False)}
        return steps.pop() if len(steps) == 1 and min(steps) > 0 else 0


class ClipText(NamedTuple):
    """What people say of a file."""

    name: str
    source: str
    captions: tuple[str, ...] = ()
    label: int | None = None


class ShardClip(NamedTuple):
    """One clip of a shard that is to be written."""

    bytes: int
    sha256: str
    facts: ClipFacts
    text: ClipText


class WrittenShard(NamedTuple):
    """A shard that is complete."""

    clips: int
    files: tuple[MediaFile, ...]


def plan_shards(clips: Sequence[ShardClip], shard_bytes: int) -> list[list[int]]:
    """Return the clips of each shard: one ends with the clip that fills it."""
    shards: list[list[int]] = []
    size = shard_bytes
    for number, clip in enumerate(clips):
        if size >= shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(number)
        size += clip.bytes
    return shards


def shard_identity(clips: Sequence[ShardClip]) -> str:
    """Return a hash of everything that a shard's bytes follow from."""
    lines = [json.dumps([clip.bytes, clip.sha256, asdict(clip.facts), clip.text]) for clip in clips]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_shard(
    folder: Path, number: int, clips: Sequence[ShardClip], read: Callable[[int], bytes | memoryview]
) -> WrittenShard:
    """Write the four files of a shard; `read` returns the bytes of its clips, which must be those examined before."""
    open_files: dict[str, HashedFile] = {}
    records: list[tuple[object, ...]] = []
    try:
        for part in PARTS:
            (folder / media_shard_name(part, number)).unlink(missing_ok=True)  # of a build that was interrupted
            open_files[part] = HashedFile(folder / media_shard_name(part, number))
        places = 0
        for place, clip in enumerate(clips):
            content = read(place)
            digest = hashlib.sha256(content).digest()
            if digest.hex() != clip.sha256:
                raise DamagedData(f"{clip.text.name} changed while the dataset was built", hint="build it again")
            facts, step = clip.facts, clip.facts.time_step
            offset = open_files["clips"].bytes
            open_files["clips"].write(content)
            open_files["texts"].write(_line(clip))
            keyframes_end = places + len(facts.keyframes)
            numbers = np.array([*facts.keyframes, *facts.offsets, *(() if step else facts.times)], dtype="<i8")
            open_files["places"].write(numbers.tobytes())
            places += len(numbers)
            records.append(
                (
                    offset, clip.bytes, list(digest), source_key(clip.text.source), facts.width, facts.height,
                    len(facts.times), facts.rotation, len(clip.text.captions),
                    -1 if clip.text.label is None else clip.text.label, facts.duration_s, facts.fps, facts.times[0],
                    step, keyframes_end, places, open_files["texts"].bytes,
                )
            )  # fmt: skip
        open_files["index"].write(np.array(records, dtype=RECORD).tobytes())
        files = [open_files[part].close() for part in PARTS]
        return WrittenShard(len(clips), tuple(MediaFile(file.name, file.bytes, file.sha256) for file in files))
    finally:
        for file in open_files.values():
            file.abandon()


def _line(clip: ShardClip) -> bytes:
    text = clip.text
    line = {"name": text.name, "source": text.source, "codec": clip.facts.codec, "captions": text.captions}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def finish_media(folder: Path, kind: Kind, clips: Sequence[ShardClip], shards: Sequence[WrittenShard]) -> MediaManifest:
    """Write the manifest and the stamp beside complete shards."""
    manifest = MediaManifest(
        kind=kind,
        clips=len(clips),
        sources=len({clip.text.source for clip in clips}),
        frames=sum(len(clip.facts.times) for clip in clips),
        duration_s=sum(round(clip.facts.duration_s * 1000) for clip in clips) / 1000,
        clips_per_shard=tuple(shard.clips for shard in shards),
        files=tuple(file for shard in shards for file in shard.files),
    )
    (folder / MANIFEST).unlink(missing_ok=True)
    write_file(folder / MANIFEST, manifest.canonical())
    write_stamp(folder, manifest.version, {file.name: stamp_of(folder / file.name) for file in manifest.files})
    return manifest
