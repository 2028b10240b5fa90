"""Build a dataset of images or video: find the files, decode each once, leave out what is damaged, write shards.

The same files, captions and options give the same bytes, with any number of processes. What was decoded and which
shards are complete is recorded beside the dataset, so that a build that was interrupted continues where it was.
"""

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headway.data.build import refuse_foreign
from headway.data.manifest import MANIFEST
from headway.data.media.dataset import MediaDataset, open_media
from headway.data.media.examiner import Examined, examine_here
from headway.data.media.filters import MediaFilters, filtered
from headway.data.media.manifest import Kind, MediaFile, MediaManifest, is_media, read_media_manifest
from headway.data.media.sources import MediaSource, find_media, read_labels, with_labels
from headway.data.media.writer import (
    ClipText,
    ShardClip,
    WrittenShard,
    finish_media,
    plan_shards,
    shard_identity,
    write_shard,
)
from headway.data.origins import SOURCES
from headway.data.writer import install_folder, write_file
from headway.errors import DamagedData, DataError, plural

SKIPPED = "skipped.jsonl"
"""What was left out of a dataset, and why; not part of its version."""


@dataclass(frozen=True)
class MediaOptions:
    """Everything besides the sources that determines a dataset's content."""

    kind: Kind
    captions: tuple[str, ...] = ()
    """JSONL or Parquet files with captions, labels and sources."""
    exclude: tuple[str, ...] = ()
    """Globs of files to leave out."""
    strict: bool = True
    """Whether captions and files must match."""
    filters: MediaFilters = field(default_factory=MediaFilters)
    """What is left out by its looks."""
    shard_bytes: int = 1 << 30
    """A shard ends with the file that fills it."""

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise DataError(f"shard_bytes is {self.shard_bytes}", hint="use at least 1")


class MediaProgress(NamedTuple):
    """Progress of a build, in bytes of the sources."""

    stage: str
    """`decode` or `write`."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class MediaResult:
    """The dataset that a build created, or found up to date."""

    path: Path
    manifest: MediaManifest
    changed: bool
    """False if the folder already held this version."""
    sources: int
    """Number of files found."""
    source_bytes: int
    skipped: dict[str, tuple[str, str]]
    """Files that were left out: by what (`damaged`, `caption`, `same bytes`, or a filter), and why."""


Examine = Callable[[Kind, Sequence[MediaSource]], Iterator[Examined]]
"""Decodes files, in any order."""


def build_media(
    out: str | Path,
    sources: Sequence[str | Path],
    options: MediaOptions,
    *,
    force: bool = False,
    examine: Examine = examine_here,
    progress: Callable[[MediaProgress], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> MediaResult:
    """Build a dataset in the folder `out`, atomically.

    A folder that already holds this version is left as it is, one with another version is replaced only with `force`,
    and one that is not a dataset is never touched. `on_skip` gets what was left out, and why.
    """
    target = Path(out).resolve()
    refuse_foreign(target)
    report, show = on_skip or (lambda _: None), progress or (lambda _: None)
    files = find_media(sources, options.kind, exclude=options.exclude, on_skip=report)
    labels = read_labels(map(Path, options.captions))
    files = with_labels(files, labels, strict=options.strict)
    existing = None if force else _existing(target)
    if existing is not None and _holds_others(existing, files, options.kind):
        raise _other_version(target, existing.version)
    with _work_folder(target) as work:
        try:
            examined = _examine(work, files, options, examine, show)
            skipped = _refused(files, examined, options, bool(labels))
            for name, (_, reason) in skipped.items():
                report(f"{name}: {reason}")
            kept = [file for file in files if file.name not in skipped]
            with _removed_if_refused(work):
                if not kept:
                    raise _nothing_left(len(files), [reason for _, reason in skipped.values()])
                if existing is not None and not _same_bytes(existing, kept, examined):
                    raise _other_version(target, existing.version)
                manifest, changed = _write(work, target, kept, examined, options, force, show)
            if changed:
                _record(work / "dataset", files, options, skipped)
                install_folder(work / "dataset", target)
        except OSError as error:
            raise DamagedData(f"cannot write {target}: {error.strerror or error}", hint="is the disk full?") from error
        shutil.rmtree(work, ignore_errors=True)
    return MediaResult(target, manifest, changed, len(files), sum(file.bytes for file in files), skipped)


def _nothing_left(files: int, reasons: Sequence[str]) -> DataError:
    """Return the error of a build that leaves out all files: the most frequent reasons, with their counts."""
    counted = Counter(reasons).most_common()
    words = [reason if files == 1 else f"{reason} ({plural(number, 'file')})" for reason, number in counted[:3]]
    more = [f"other reasons ({plural(sum(number for _, number in counted[3:]), 'file')})"] if counted[3:] else []
    return DataError(
        f"none of {plural(files, 'file')} can be used: {', '.join(words + more)}",
        hint="check the globs, --kind and what was skipped",
    )


def _existing(target: Path) -> MediaDataset | None:
    """Return the dataset that a build must agree with; None if there is none, or it is damaged."""
    if not is_media(target):
        return None
    try:
        return open_media(target)
    except DataError:
        return None


def _holds_others(dataset: MediaDataset, files: Sequence[MediaSource], kind: Kind) -> bool:
    """Return whether no build of these files can give this dataset, as far as is known before they are decoded."""
    if dataset.kind != kind or dataset.clips > len(files):
        return True
    sources = {file.name: (file.bytes, _text_of(file)) for file in files}
    clips = map(dataset.clip, range(dataset.clips))
    return any(
        sources.get(clip.name) != (clip.bytes, ClipText(clip.name, clip.source, clip.captions, clip.label))
        for clip in clips
    )


def _same_bytes(dataset: MediaDataset, files: Sequence[MediaSource], examined: dict[str, Examined]) -> bool:
    """Return whether a dataset has the bytes of these files, in order."""
    held = (dataset.clip(number).sha256 for number in range(dataset.clips))
    return dataset.clips == len(files) and all(
        examined[file.name].sha256 == sha256 for file, sha256 in zip(files, held, strict=True)
    )


def _other_version(target: Path, version: str, built: str = "another one") -> DataError:
    return DataError(
        f"{target} holds version {version}, this build makes {built}",
        hint="replace it with --force, or choose another folder",
    )


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """Hold the folder of a build, which outlives an interrupted one."""
    work = target.parent / f".{target.name}.partial"
    try:
        (work / "dataset").mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise DamagedData(f"cannot write in {target.parent}: {error.strerror}", hint="choose another folder") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another build is writing {target}", hint="wait for it, or choose another folder"
            ) from None
        yield work
    finally:
        os.close(lock)


@contextmanager
def _removed_if_refused(work: Path) -> Iterator[None]:
    """Remove the folder of a build that would end the same way again; damage and a full disk may pass."""
    try:
        yield
    except DataError as error:
        if not isinstance(error, DamagedData):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _examine(
    work: Path,
    files: Sequence[MediaSource],
    options: MediaOptions,
    examine: Examine,
    show: Callable[[MediaProgress], None],
) -> dict[str, Examined]:
    """Return what decoding says of each file; files that an interrupted build decoded are not decoded again."""
    journal = work / f"examined-{options.kind}.jsonl"
    stamps = {file.name: [str(file.root), file.bytes, file.mtime_ns] for file in files}
    known = {result.name: result for stamp, result in _read_journal(journal) if stamps.get(result.name) == stamp}
    total = sum(file.bytes for file in files)
    done = sum(file.bytes for file in files if file.name in known)
    sizes = {file.name: file.bytes for file in files}
    show(MediaProgress("decode", done, total))
    with journal.open("a", encoding="utf-8") as out:
        for result in examine(options.kind, [file for file in files if file.name not in known]):
            known[result.name] = result
            out.write(json.dumps([stamps[result.name], result.to_json()]) + "\n")
            out.flush()
            done += sizes[result.name]
            show(MediaProgress("decode", done, total))
    return known


def _read_journal(path: Path) -> Iterator[tuple[Any, Examined]]:
    """Yield (stamp, result) of each file; a torn last line is ignored."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            stamp, values = json.loads(line)
            yield stamp, Examined.from_json(values)
        except (ValueError, KeyError, TypeError):
            continue


def _refused(
    files: Sequence[MediaSource], examined: dict[str, Examined], options: MediaOptions, labelled: bool
) -> dict[str, tuple[str, str]]:
    """Return the files that are left out: by what, and why."""
    refused: dict[str, tuple[str, str]] = {}
    first: dict[str, str] = {}
    for file in files:
        result = examined[file.name]
        if result.facts is None:
            refused[file.name] = ("damaged", result.refused)
        elif labelled and not options.strict and not file.labels.captions:
            refused[file.name] = ("caption", "it has no caption")
        elif first.setdefault(result.sha256, file.name) != file.name:
            refused[file.name] = ("same bytes", f"it has the same bytes as {first[result.sha256]}")
    looks = [
        (file.name, str(file.path), seen)
        for file in files
        if file.name not in refused and (seen := examined[file.name].appearance) is not None
    ]
    return refused | filtered(options.filters, looks)


def _write(
    work: Path,
    target: Path,
    files: Sequence[MediaSource],
    examined: dict[str, Examined],
    options: MediaOptions,
    force: bool,
    show: Callable[[MediaProgress], None],
) -> tuple[MediaManifest, bool]:
    """Write the shards that an interrupted build has not completed; return whether the dataset is a new one."""
    clips = [_shard_clip(file, examined[file.name]) for file in files]
    total, done = sum(clip.bytes for clip in clips), 0
    folder, shards = work / "dataset", []
    for number, members in enumerate(plan_shards(clips, options.shard_bytes)):
        own = [clips[index] for index in members]
        paths = [files[index].path for index in members]
        shards.append(_shard(folder, work, number, own, paths))
        done += sum(clip.bytes for clip in own)
        show(MediaProgress("write", done, total))
    for stale in {path.name for path in folder.iterdir()} - {file.name for shard in shards for file in shard.files}:
        (folder / stale).unlink()
    manifest = finish_media(folder, options.kind, clips, shards)
    return manifest, _is_new(target, manifest, force)


def _shard_clip(file: MediaSource, result: Examined) -> ShardClip:
    assert result.facts is not None, "damaged files were left out"
    return ShardClip(file.bytes, result.sha256, result.facts, _text_of(file))


def _text_of(file: MediaSource) -> ClipText:
    labels = file.labels
    return ClipText(file.name, labels.source or file.name, labels.captions, labels.label)


def _shard(folder: Path, work: Path, number: int, clips: Sequence[ShardClip], paths: Sequence[Path]) -> WrittenShard:
    identity, record = shard_identity(clips), work / f"shard-{number:05d}.json"
    try:
        known = json.loads(record.read_bytes())
        if known["identity"] == identity:
            files = tuple(MediaFile(**file) for file in known["files"])
            if all((folder / file.name).stat().st_size == file.bytes for file in files):
                return WrittenShard(len(clips), files)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    record.unlink(missing_ok=True)
    written = write_shard(folder, number, clips, lambda place: paths[place].read_bytes())
    write_file(record, json.dumps({"identity": identity, "files": [asdict(file) for file in written.files]}).encode())
    return written


def _is_new(target: Path, manifest: MediaManifest, force: bool) -> bool:
    """Return whether a dataset must be installed; False if the one in place is the same and intact."""
    if not (target / MANIFEST).is_file() or force:
        return True
    try:
        existing = read_media_manifest(target).version
    except DataError as error:
        raise DataError(f"{error.message}, not this dataset", hint="replace it with --force") from None
    if existing != manifest.version:
        raise _other_version(target, existing, manifest.version)
    try:
        open_media(target, verify="full")
    except DataError:
        return True
    return False


def _record(
    folder: Path, files: Sequence[MediaSource], options: MediaOptions, skipped: dict[str, tuple[str, str]]
) -> None:
    """Record where a dataset comes from and what was left out, beside it."""
    origin = {
        "format": 1,
        "options": asdict(options),
        "files": [{"path": str(file.path), "bytes": file.bytes, "mtime_ns": file.mtime_ns} for file in files],
    }
    write_file(folder / SOURCES, json.dumps(origin, indent=1).encode() + b"\n")
    lines = (
        json.dumps({"file": name, "by": by, "why": reason}, ensure_ascii=False) + "\n"
        for name, (by, reason) in skipped.items()
    )
    write_file(folder / SKIPPED, "".join(lines).encode())
