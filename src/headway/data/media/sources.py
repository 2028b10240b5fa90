"""Find the files of a dataset of images or video, by globs, folders or manifests, and their captions.

A file's name is its path below the folder that its glob starts from, or below its manifest's folder. Files that a link
or `..` leads to outside of that folder are refused.
"""

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from headway.data.compressed import open_plain
from headway.data.media.manifest import Kind
from headway.data.parquet import read_dicts
from headway.errors import DataError, plural

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif"),
    "video": (
        ".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".gif",
    ),
}  # fmt: skip
"""What is taken from a folder."""
LISTS = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Manifests: a row per file."""
EXAMPLE = 'a row is {"file": "a.mp4", "caption": "a red kite"}'
MOST_LABEL = (1 << 62) - 1
_KEYS = ("file", "caption", "captions", "label", "source")


def other_kind(kind: Kind) -> Kind:
    """Return the kind that it is not."""
    return "video" if kind == "image" else "image"


class ClipLabels(NamedTuple):
    """What rows say of a file."""

    captions: tuple[str, ...] = ()
    label: int | None = None
    source: str | None = None
    row: str = ""
    """Where the first of the rows is."""


NO_LABELS = ClipLabels()


@dataclass(frozen=True)
class MediaSource:
    """One file to read."""

    name: str
    root: Path
    bytes: int
    mtime_ns: int
    labels: ClipLabels = NO_LABELS

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.root / self.name


def find_media(
    patterns: Sequence[str | Path], kind: Kind, *, exclude: Sequence[str] = (), on_skip: Callable[[str], None]
) -> list[MediaSource]:
    """Return the files that globs, folders and manifests name, each once, sorted by name."""
    files: dict[str, MediaSource] = {}
    for pattern in map(str, patterns):
        for source in _expand(pattern, kind, on_skip):
            if any(PurePosixPath(source.name).match(rule) for rule in exclude):
                continue
            known = files.setdefault(source.name, source)
            if known.path.resolve() != source.path.resolve():
                raise DataError(
                    f"{known.path} and {source.path} have the same name, {source.name}",
                    hint="use one glob that starts from a folder above both",
                )
    if not files:
        raise DataError("no sources given" if not patterns else "no file is left to build from", hint="check the globs")
    return [files[name] for name in sorted(files)]


def _expand(pattern: str, kind: Kind, on_skip: Callable[[str], None]) -> Iterator[MediaSource]:
    path = Path(pattern).expanduser()
    if path.is_file():
        if path.name.lower().endswith(LISTS):
            yield from _listed(path)
        else:
            yield from _below(path.parent, [path.name], on_skip)
        return
    if path.is_dir():
        files = list(path.rglob("*"))
        names = [str(file.relative_to(path)) for file in files if file.suffix.lower() in SUFFIXES[kind]]
        if not names:
            raise DataError(f"folder {pattern} holds no {kind} file", hint=f"known: {', '.join(SUFFIXES[kind])}")
        other = other_kind(kind)
        others = sum(file.suffix.lower() in set(SUFFIXES[other]) - set(SUFFIXES[kind]) for file in files)
        if others:
            on_skip(f"{plural(others, f'{other} file')} of {pattern}: not of kind {kind}")
        yield from _below(path, names, on_skip)
        return
    if not glob.has_magic(pattern):
        raise DataError(f"file {pattern} does not exist", hint="check the path; globs such as 'clips/**/*.mp4' work")
    fixed = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
    # Not Path.glob: it finds hidden files too, and does not follow links to folders.
    below = glob.glob(str(path.relative_to(fixed)), root_dir=fixed, recursive=True)  # noqa: PTH207
    matching = [name for name in below if (fixed / name).is_file()]
    if not matching:
        raise DataError(f"no file matches {pattern}", hint="check the path, and use ** to search sub-folders")
    yield from _below(fixed, matching, on_skip)


def _below(root: Path, names: Iterable[str], on_skip: Callable[[str], None]) -> Iterator[MediaSource]:
    """Yield the files of a folder, without those that links lead to outside of it."""
    root = root.resolve()
    for name in sorted(names):
        source = inside(root, name)
        if source is None:
            on_skip(f"{root / name}: a link leads outside of {root}")
        else:
            yield source


def inside(root: Path, name: str) -> MediaSource | None:
    """Return a file below a folder; None if the name leads outside of it."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return None
    real = (root / name).resolve()
    if not real.is_relative_to(root):
        return None
    status = real.stat()
    return MediaSource(str(PurePosixPath(name)), root, status.st_size, status.st_mtime_ns)


def _listed(path: Path) -> Iterator[MediaSource]:
    """Yield the files that a manifest lists, below its folder."""
    root = path.parent.resolve()
    for name, labels in read_labels([path]).items():
        try:
            source = inside(root, name)
        except OSError as error:
            raise DataError(f"{labels.row}: cannot read {name}: {error.strerror}") from None
        if source is None:
            raise DataError(f"{labels.row}: {name} is not below {root}", hint="name files below the manifest's folder")
        yield replace(source, labels=labels)


def read_labels(paths: Iterable[Path]) -> dict[str, ClipLabels]:
    """Return the captions, labels and sources by file name; rows of one file add up."""
    rows: dict[str, ClipLabels] = {}
    for path in paths:
        if not path.is_file():
            raise DataError(f"there is no file {path} of captions", hint="name a JSONL or Parquet file", usage=True)
        where = ""
        for where, row in _rows(path):
            name, new = _checked(where, row)
            old = rows.get(name, new._replace(captions=()))
            for key in ("label", "source"):
                if getattr(new, key) not in (None, getattr(old, key)) and getattr(old, key) is not None:
                    raise DataError(
                        f"{where}: {name} has {key} {getattr(new, key)!r}, not {getattr(old, key)!r} as in {old.row}",
                        hint=f"a file has one {key}: correct one of the rows",
                    )
            rows[name] = ClipLabels(
                captions=tuple(dict.fromkeys((*old.captions, *new.captions))),
                label=new.label if old.label is None else old.label,
                source=new.source if old.source is None else old.source,
                row=old.row,
            )
        if not where:
            raise DataError(f"{path} has no rows", hint=EXAMPLE)
    return rows


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSONL or Parquet file, and where each is."""
    if path.name.endswith(".parquet"):
        for number, row, _ in read_dicts(path, _KEYS, path.stat().st_size, lambda _: True):
            yield f"{path}:{number}", row
        return
    try:
        with open_plain(path) as (plain, _):
            for number, line in enumerate(plain, start=1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except ValueError:
                        raise DataError(
                            f"{path}:{number} is not JSON", hint=f"captions are JSONL or Parquet; {EXAMPLE}"
                        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _checked(where: str, row: Any) -> tuple[str, ClipLabels]:
    """Return the file name of a row, and what it says."""
    if not isinstance(row, Mapping) or not isinstance(row.get("file"), str) or not row["file"]:
        raise DataError(f"{where} names no file", hint=EXAMPLE)
    unknown = [key for key in row if key not in _KEYS]
    if unknown:
        raise DataError(f"{where} has an unknown key {unknown[0]!r}", hint=f"known: {', '.join(_KEYS)}")
    captions = [row["caption"]] if row.get("caption") is not None else []
    listed = row.get("captions")
    captions += listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(caption, str) and caption.strip() for caption in captions):
        raise DataError(f"{where} has a caption that is empty or no text", hint=EXAMPLE)
    label, source = row.get("label"), row.get("source")
    if label is not None and (not isinstance(label, int) or isinstance(label, bool) or not 0 <= label <= MOST_LABEL):
        raise DataError(f"{where} has the label {label!r}", hint=f"a label is a whole number from 0 to {MOST_LABEL:,}")
    if source is not None and (not isinstance(source, str) or not source):
        raise DataError(f"{where} has the source {source!r}", hint="a source is a text")
    return str(PurePosixPath(row["file"])), ClipLabels(tuple(captions), label, source, where)


def with_labels(sources: Sequence[MediaSource], labels: Mapping[str, ClipLabels], *, strict: bool) -> list[MediaSource]:
    """Return files with their captions; raise DataError if rows and files do not match, unless it is not strict."""
    names = {source.name for source in sources}
    unknown = [(name, row.row) for name, row in labels.items() if name not in names]
    if unknown and strict:
        more = f" (and {plural(len(unknown) - 1, 'more row')})" if len(unknown) > 1 else ""
        raise DataError(
            f"{unknown[0][1]} is about {unknown[0][0]}, which is not among the {plural(len(sources), 'file')}{more}",
            hint="name files as paths below the glob's folder, or leave such rows out with --errors skip",
        )
    merged = [replace(source, labels=labels.get(source.name, source.labels)) for source in sources]
    without = [source.name for source in merged if not source.labels.captions]
    if labels and without and len(without) < len(merged) and strict:
        raise DataError(
            f"{plural(len(without), 'file')} of {len(merged):,} have no caption: {', '.join(without[:3])}",
            hint="caption them, or leave such files out with --errors skip",
        )
    return merged
