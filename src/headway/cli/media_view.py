"""How `headway data` builds and shows images and video."""

import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.cli.text import byte_size, columns, duration, plural, shortened
from headway.data.media import MediaManifest, MediaResult, open_media
from headway.data.media.manifest import Kind
from headway.data.media.probe import MediaFacts, histogram
from headway.data.media.sources import LISTS, SUFFIXES, other_kind
from headway.data.sources import glob_regex
from headway.errors import DataError
from headway.state.object_store import open_store

MANIFEST_FACTS = ("version", "kind", "clips", "sources", "frames", "duration_s", "bytes")
GOLDEN = 0.618033988749895
FETCHES = 8
"""Objects that are read from a store at a time."""


def kind_of(sources: Sequence[str]) -> Kind | None:
    """Return what sources are if the ends of their names leave no doubt; `.ts` may be TypeScript."""
    for kind, suffixes in SUFFIXES.items():
        if all(source.lower().endswith(suffixes) and not source.endswith(".ts") for source in sources):
            return kind
    return None


@contextmanager
def local_sources(sources: Sequence[str], kind: Kind, out: Path) -> Iterator[list[str]]:
    """Yield sources with object stores replaced by folders beside `out` that their files were copied to.

    A copy that is complete is not made again; the folders stay until the dataset is built.
    """
    folder = out.absolute().parent / f".{out.name}.objects"
    local: list[str] = []
    for number, source in enumerate(sources):
        local.append(_fetched(source, kind, folder / str(number)) if "://" in source else source)
    yield local
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def _fetched(url: str, kind: Kind, folder: Path) -> str:
    """Copy the files below a URL, or those that a glob at its end matches; return the folder."""
    fixed, pattern = url, "**"
    for place, char in enumerate(url):
        if char in "*?[":
            fixed = url[:place].rpartition("/")[0]
            pattern = url[len(fixed) + 1 :]
            break
    store = open_store(fixed)
    chosen = [
        item
        for item in store.list()
        if _matches(item.key, pattern) and item.key.lower().endswith(SUFFIXES[kind] + LISTS)
    ]
    if not chosen:
        raise DataError(f"no {kind} file matches {url}", hint="check the URL, and use ** to search below it")
    root = folder.resolve()

    def fetch(item: Any) -> None:
        target = (folder / item.key).resolve()
        if not target.is_relative_to(root):
            raise DataError(f"{store.name(item.key)} has a name that leads outside of the dataset")
        if target.is_file() and target.stat().st_size == item.bytes:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        partial.write_bytes(store.get(item.key))
        partial.replace(target)

    with ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch") as pool:
        for number, _ in enumerate(pool.map(fetch, chosen), start=1):
            if number % 100 == 0 or number == len(chosen):
                print(f"fetched {number:,} of {plural(len(chosen), 'object')}", file=sys.stderr)
    return str(folder)


def _matches(key: str, pattern: str) -> bool:
    """Return whether a glob matches a key: `**` any number of folders, `*` within one."""
    return pattern == "**" or re.fullmatch(glob_regex(pattern), key) is not None


def media_facts(path: Path, manifest: MediaManifest) -> dict[str, Any]:
    """Return what `--json` says of a dataset."""
    return {
        "path": str(path),
        **{key: getattr(manifest, key) for key in MANIFEST_FACTS},
        "shards": len(manifest.clips_per_shard),
    }


def print_media(path: Path, manifest: MediaManifest) -> None:
    """Print the counts of a dataset."""
    noun = "clip" if manifest.kind == "video" else "image"
    print(f"dataset    {path}")
    print(f"version    {manifest.version}")
    shards = plural(len(manifest.clips_per_shard), "shard")
    print(f"{noun + 's':10} {manifest.clips:,} in {shards}, {byte_size(manifest.bytes)}")
    print(f"sources    {manifest.sources:,}, held out as a whole")
    if manifest.kind == "video":
        print(f"frames     {manifest.frames:,}, {duration(manifest.duration_s)} of video")


def build_facts(built: MediaResult) -> dict[str, Any]:
    """Return what `--json` says of a build."""
    removed = Counter(by for by, _ in built.skipped.values())
    return media_facts(built.path, built.manifest) | {
        "files": built.sources,
        "source_bytes": built.source_bytes,
        "changed": built.changed,
        "removed": dict(removed),
        "skipped": [{"file": name, "by": by, "why": why} for name, (by, why) in built.skipped.items()],
    }


def print_built(built: MediaResult, out: Path) -> None:
    """Print what was built."""
    print_media(built.path, built.manifest)
    print(f"files      {built.sources:,}, {byte_size(built.source_bytes)}")
    if built.skipped:
        removed = Counter(by for by, _ in built.skipped.values())
        words = ", ".join(f"{by} {number:,}" for by, number in sorted(removed.items()))
        print(f"left out   {len(built.skipped):,}: {words} (skipped.jsonl says why)")
    if not built.changed:
        print("unchanged  this version already exists")
    print(f"\nnext: headway data show {shlex.quote(str(out))} --sheet sheet.png")


def sample_clips(path: Path, samples: int) -> list[dict[str, Any]]:
    """Return facts of clips spread evenly over a dataset."""
    dataset = open_media(path)
    return [
        {
            "clip": clip.number, "name": clip.name, "source": clip.source, "codec": clip.codec, "width": clip.width,
            "height": clip.height, "frames": clip.frames, "fps": round(clip.fps, 3), "duration_s": clip.duration_s,
            "keyframes": len(clip.keyframes), "rotation": clip.rotation, "captions": list(clip.captions),
            "label": clip.label, "bytes": clip.bytes, "sha256": clip.sha256,
        }
        for clip in map(dataset.clip, spread_over(dataset.clips, samples))
    ]  # fmt: skip


def spread_over(clips: int, most: int) -> list[int]:
    """Return the numbers of at most so many clips: one in each equal part, at different places of the parts, so that
    clips which alternate in some order are all shown."""
    most = min(most, clips)
    ends = [index * clips // most for index in range(most + 1)] if most else [0]
    return [low + int((high - low) * (index * GOLDEN % 1)) for index, (low, high) in enumerate(pairwise(ends))]


def print_clip(clip: dict[str, Any], kind: Kind) -> None:
    """Print a clip or an image in a few lines."""
    noun = "clip" if kind == "video" else "image"
    moving = f", {plural(clip['frames'], 'frame')} at {clip['fps']:g} fps, {plural(clip['keyframes'], 'keyframe')}"
    facts = f"{clip['codec']}, {clip['width']} x {clip['height']}{moving if clip['frames'] > 1 else ''}"
    label = "" if clip["label"] is None else f", label {clip['label']}"
    print(f"\n{noun} {clip['clip']:,}  {shortened(clip['name'], columns() - 15)}")
    print(f"  {shortened(facts + label, columns() - 2)}")
    for caption in clip["captions"][:3]:
        print(f"  {shortened(repr(caption)[1:-1], columns() - 2)}")


def probe_facts(facts: MediaFacts) -> dict[str, Any]:
    """Return what `--json` says of a probe."""
    return {
        "path": facts.path, "kind": facts.kind, "files": len(facts), "bytes": facts.bytes, "width": facts.width,
        "height": facts.height, "duration_s": facts.duration_s, "fps": facts.fps, "unreadable": facts.unreadable,
        "other_files": facts.other_files,
    }  # fmt: skip


def print_probe(facts: MediaFacts) -> None:
    """Print histograms of durations, sizes and frame rates."""
    noun = "video" if facts.kind == "video" else "image"
    total = f", {duration(sum(facts.duration_s))}" if facts.kind == "video" else ""
    print(f"{facts.path}: {plural(len(facts), noun)}, {byte_size(facts.bytes)}{total}")
    if len(facts) and facts.kind == "video":
        _print_bars("duration, seconds", [(_range(a, b), n) for a, b, n in histogram(facts.duration_s)])
        _print_bars("frames per second", [(_range(a, b), n) for a, b, n in histogram([round(f, 2) for f in facts.fps])])
    if len(facts):
        sizes = Counter(f"{w} x {h}" for w, h in zip(facts.width, facts.height, strict=True)).most_common()
        rest = sum(number for _, number in sizes[7:])
        _print_bars("size, pixels", sizes[:7] + ([(f"{len(sizes) - 7} others", rest)] if rest else []))
    for name, reason in list(facts.unreadable.items())[:5]:
        print(shortened(f"unreadable: {name}: {reason}", columns()), file=sys.stderr)
    if len(facts.unreadable) > 5:
        print(f"and {len(facts.unreadable) - 5:,} more are unreadable (--json lists all)", file=sys.stderr)
    if facts.other_files:
        other = other_kind(facts.kind)
        print(f"left out: {plural(facts.other_files, f'{other} file')} (--kind {other} probes them)", file=sys.stderr)


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _print_bars(title: str, rows: Sequence[tuple[str, int]]) -> None:
    print(f"\n  {title}")
    label = max(len(name) for name, _ in rows)
    numbers = max(len(f"{number:,}") for _, number in rows)
    width = columns() - label - numbers - 8
    most = max(number for _, number in rows)
    for name, number in rows:
        bar = "#" * max(round(width * number / most), 1 if number else 0)
        print(f"    {name:>{label}}  {number:>{numbers},}  {bar}".rstrip())
