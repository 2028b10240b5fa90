"""The manifest of a dataset of images or video, and its version.

Format 3: a folder of shards, each of four files. `clips-NNNNN.bin` has the original bytes of the files, one after
another; `index-NNNNN.bin` a record per clip (`RECORD`); `places-NNNNN.bin` little-endian int64: the frame numbers and
byte offsets of its keyframes, and the timestamps of its frames if they are not evenly spaced; `texts-NNNNN.jsonl` a
line per clip: its name, source, codec and captions. Clips are in the order of their names, so that the version, a hash
of the manifest, follows from the files, captions and labels alone.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headway.data.manifest import MANIFEST, MEDIA_FORMAT, nearby_datasets
from headway.errors import DamagedData, DataError

Kind = Literal["image", "video"]
ShardPart = Literal["clips", "index", "places", "texts"]
EXAMPLES: dict[Kind, str] = {"image": "'images/**/*.png'", "video": "'clips/**/*.mp4'"}
PARTS: tuple[ShardPart, ...] = ("clips", "index", "places", "texts")

RECORD = [
    ("offset", "<u8"),  # of the clip's bytes in the shard
    ("bytes", "<u8"),
    ("sha256", "u1", (32,)),
    ("source", "<u8"),  # the first 8 bytes of the sha256 of its source's name
    ("width", "<u4"),  # as shown: after rotation, with square pixels
    ("height", "<u4"),
    ("frames", "<u4"),
    ("rotation", "<u2"),  # degrees, clockwise, that were applied
    ("captions", "<u2"),
    ("label", "<i8"),  # -1: none
    ("duration_s", "<f8"),
    ("fps", "<f8"),
    ("first_time", "<i8"),  # timestamp of the first frame, in the stream's unit
    ("time_step", "<i8"),  # between frames; 0: each frame's timestamp is in the places file
    ("keyframes_end", "<u8"),  # in the shard's list of places: this clip's frame numbers, as many offsets after them
    ("places_end", "<u8"),
    ("text_end", "<u8"),  # in the shard's texts
]


@dataclass(frozen=True)
class MediaFile:
    """One file of a dataset."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class MediaManifest:
    """The counts and hashes of a dataset of images or video."""

    kind: Kind
    clips: int
    sources: int
    """Files or films that the clips come from; clips of one source are held out together."""
    frames: int
    duration_s: float
    clips_per_shard: tuple[int, ...]
    files: tuple[MediaFile, ...]
    """The four files of each shard, in the order of `PARTS`."""
    format: int = MEDIA_FORMAT

    def canonical(self) -> bytes:
        """Serialize the manifest; equal content gives equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"

    @property
    def version(self) -> str:
        """The first 16 hex digits of the manifest's sha256."""
        return hashlib.sha256(self.canonical()).hexdigest()[:16]

    @property
    def bytes(self) -> int:
        """Bytes of the original files."""
        return sum(file.bytes for file in self.files[:: len(PARTS)])


def media_shard_name(part: ShardPart, number: int) -> str:
    """Return the name of a file of a shard."""
    return f"{part}-{number:05d}.{'jsonl' if part == 'texts' else 'bin'}"


def is_media(folder: Path) -> bool:
    """Return whether a folder holds a dataset of images or video, whole or damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == MEDIA_FORMAT


def read_media_manifest(folder: Path, kind: Kind = "video") -> MediaManifest:
    """Read and check a folder's manifest.json; where there is none, a hint says how to build one of the kind."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        near = nearby_datasets(folder)
        build = f"build one: headway data build {folder} {EXAMPLES[kind]} --kind {kind}"
        hint = f"did you mean {' or '.join(near)}?" if near else build
        raise DataError(f"{folder} holds no dataset: {MANIFEST} is missing", hint=hint) from None
    except OSError as error:
        raise DamagedData(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    format = content.get("format") if isinstance(content, dict) else None
    if format in (1, 2):
        raise DataError(f"{folder} holds text, not images or video", hint='set data.kind = "text"')
    if format != MEDIA_FORMAT:
        hint = "use the version of Headway that built it"
        raise DataError(f"{path} has format {format}; this version of Headway reads {MEDIA_FORMAT}", hint=hint)
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    _check_consistent(manifest, path)
    return manifest


def _parse(content: dict[str, Any]) -> MediaManifest:
    values = dict(content)
    values["files"] = tuple(MediaFile(**file) for file in values["files"])
    values["clips_per_shard"] = tuple(map(int, values["clips_per_shard"]))
    return MediaManifest(**values)


def _check_consistent(manifest: MediaManifest, path: Path) -> None:
    """Raise DamagedData if the entries disagree, before any of them is used to map memory."""
    names = [media_shard_name(part, shard) for shard in range(len(manifest.clips_per_shard)) for part in PARTS]
    if manifest.kind not in ("image", "video") or [file.name for file in manifest.files] != names or not names:
        raise _damaged(path, "its kind or list of files is invalid")
    if sum(manifest.clips_per_shard) != manifest.clips or min(manifest.clips_per_shard) < 1:
        raise _damaged(path, "its counts of clips disagree")


def _damaged(path: Path, why: str) -> DamagedData:
    return DamagedData(f"{path} is damaged: {why}", hint="copy the dataset again, or rebuild it with --force")
