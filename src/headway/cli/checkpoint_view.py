"""Formats `headway checkpoint`: tables of at most 80 columns, and a progress bar."""

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway.cli.progress import terminal_bars
from headway.cli.text import byte_size, columns, first_names, plural
from headway.state import CheckpointSource, OpenCheckpoint
from headway.state.checkpoint_diff import CheckpointDiff
from headway.state.manifest import CheckpointManifest, TensorEntry
from headway.state.safetensors_file import DTYPES

SHOWN = 20
PATIENCE_S = 1.0
KINDS = {"model": "weights", "optimizer": "optimizer", "ema": "average"}
DIMS = ("rows", "columns")


class CountingSource(CheckpointSource):
    """A source that reports how many bytes were read, and of how many."""

    def __init__(self, inner: CheckpointSource, progress: Callable[[int, int], None]) -> None:
        self.location, self.request_bytes = inner.location, inner.request_bytes
        self._inner, self._progress = inner, progress
        self._sizes: dict[str, int] = {}
        self._done = 0

    def manifest(self) -> bytes:
        """See CheckpointSource."""
        return self._inner.manifest()

    def size(self, file: str) -> int:
        """See CheckpointSource."""
        self._sizes[file] = self._inner.size(file)
        return self._sizes[file]

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See CheckpointSource."""
        self._inner.read(file, begin, out)
        self._done += len(out)
        self._progress(self._done, sum(self._sizes.values()))

    def name(self, file: str) -> str:
        """See CheckpointSource."""
        return self._inner.name(file)


@contextmanager
def progress_bar(label: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield what draws a bar of bytes on a terminal once the work has taken a second."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bars = terminal_bars("{task.description}", "Bar", "Download", "TransferSpeed", "TimeRemaining")
    began = time.monotonic()
    task = bars.add_task(label, total=None)

    def draw(done: int, total: int) -> None:
        if time.monotonic() - began > PATIENCE_S:
            bars.start()
            bars.update(task, completed=min(done, total), total=total)

    try:
        yield draw
    finally:
        bars.stop()


def list_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of a run's checkpoints."""
    narrow = columns() < 72  # the digest stays whole: people compare it
    yield f"    step  tier         size  {'' if narrow else 'workers  saved                '}digest"
    for row in rows:
        begin = f"{row['step'] if row['step'] >= 0 else '-':>8}  {row['tier']:6}"
        if "damage" in row:
            yield f"{begin}  {row['damage']}"
        else:
            digest, workers = row.get("digest", "")[:16], row.get("workers", "")
            more = "" if narrow else f"{workers:>7}  {_when(row['saved'])}  "
            yield f"{begin}  {byte_size(row['bytes']):>9}  {more}{digest}".rstrip()
    shared = sum(row.get("shared_bytes", 0) for row in rows)
    if shared:
        yield f"{byte_size(shared)} are files shared with an older checkpoint"


def facts_of(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return a summary of a checkpoint's manifest."""
    manifest = checkpoint.manifest
    facts = manifest.model_dump(mode="json", exclude={"tensors", "files", "rng", "format", "chunk_bytes"})
    return facts | {
        "bytes": manifest.bytes,
        "num_tensors": len(manifest.tensors),
        "kinds": _kinds(manifest),
        "files": {name: file.bytes for name, file in manifest.files.items()},
    }


def tensor_rows(checkpoint: OpenCheckpoint) -> list[dict[str, Any]]:
    """Return each tensor's name, dtype, shape, sharding, bytes and digest."""
    return [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "cut": cut_of(tensor),
            "bytes": _bytes(tensor),
            "digest": tensor.digest,
        }
        for name, tensor in checkpoint.manifest.tensors.items()
    ]


def cut_of(tensor: TensorEntry) -> str:
    """Return how a tensor is sharded: whole, 2 x rows, rows x columns 2 x 2."""
    pieces = [piece.box for piece in tensor.pieces if piece.box.volume]
    if len(pieces) <= 1:
        return "whole"
    cuts = [len({(box.start[dim], box.shape[dim]) for box in pieces}) for dim in range(len(tensor.shape))]
    names = [DIMS[dim] if dim < len(DIMS) else f"dim {dim}" for dim in range(len(cuts))]
    along = [(name, count) for name, count in zip(names, cuts, strict=True) if count > 1]
    total = 1
    for _, count in along:
        total *= count
    if total != len(pieces):
        return plural(len(pieces), "piece")
    if len(along) == 1:
        return f"{along[0][1]} x {along[0][0]}"
    return f"{' x '.join(name for name, _ in along)} {' x '.join(str(count) for _, count in along)}"


def show_lines(place: str, facts: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text of a checkpoint, with its tensors if given."""
    yield place
    saved = "" if facts["saved"] is None else f", saved {_when(facts['saved'])}"
    yield _fact("step", f"{facts['step']}{saved}")
    yield _fact("digest", facts["digest"] + (" (of format 1)" if facts["digest_function"] == 1 else ""))
    yield _fact("chain", facts["chain"])
    yield _fact("cursor", f"{plural(facts['cursor'], 'sample')}")
    if facts["data_version"]:
        yield _fact("data", f"version {facts['data_version']}")
    if facts["recipe"]:
        yield _fact("recipe", str(facts["recipe"].get("name", "")))
    if "imported" in facts["extra"]:
        yield _fact("imported", f"from {facts['extra']['imported']}")
    workers = plural(facts["workers"], "worker")
    yield _fact("mesh", ", ".join(filter(None, [_mesh(facts["mesh"]), workers])))
    for kind, kind_facts in facts["kinds"].items():
        dtypes = ", ".join(f"{name} {byte_size(count)}" for name, count in kind_facts["dtypes"].items())
        yield _fact(kind, f"{byte_size(kind_facts['bytes'])} in {plural(kind_facts['tensors'], 'tensor')}: {dtypes}")
    yield from _file_lines(facts["files"])
    if tensors:
        yield ""
        yield from _tensor_lines(tensors)


def diff_lines(first: str, second: str, diff: CheckpointDiff) -> Iterator[str]:
    """Yield the differences of two checkpoints."""
    yield from _wrap(f"{first} and {second}: {_verdict(diff)}")
    if diff.differing:
        yield f"  {'tensor':<38}{'differing of':>21}{'largest':>9}{'relative':>10}"
    for tensor in diff.differing[:SHOWN]:
        numbers = f"{f'{tensor.differing:,} of {tensor.elements:,}':>21}{tensor.absolute:>9.2g}{tensor.relative:>10.2g}"
        yield from _beside(tensor.name, 38, numbers)
    if len(diff.differing) > SHOWN:
        yield f"  and {len(diff.differing) - SHOWN:,} more (--json lists all)"
    for label, names in ((first, diff.only_first), (second, diff.only_second)):
        if names:
            yield from _wrap(f"only in {label}: {first_names(names)}")
    for name, (a, b) in list(diff.unlike.items())[:SHOWN]:
        yield from _wrap(f"{name}: {a} | {b}")
    if len(diff.unlike) > SHOWN:
        yield f"and {len(diff.unlike) - SHOWN:,} more of another shape or dtype"
    for key, (a, b) in diff.facts.items():
        yield _fact(key.removesuffix("_version"), f"{_value(a)} | {_value(b)}")
    if not diff.same_rng:
        yield _fact("rng", "the random generators differ")
    for key, (a, b) in diff.recipe.items():
        yield _fact("recipe", f"{key}: {_value(a)} | {_value(b)}")


def _verdict(diff: CheckpointDiff) -> str:
    tensors = plural(diff.tensors, "tensor")
    if diff.equal:
        how = "same digest" if diff.by == "digest" else "all bits compared; digests are not comparable"
        return f"equal, {tensors} ({how})"
    counts = {
        "differ": len(diff.differing),
        "of another shape or dtype": len(diff.unlike),
        "only in one": len(diff.only_first) + len(diff.only_second),
    }
    return f"different: {tensors} in both; " + ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)


def _kinds(manifest: CheckpointManifest) -> dict[str, dict[str, Any]]:
    """Return tensors and bytes by purpose, and by dtype."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, tensor in manifest.tensors.items():
        prefix = name.partition("/")[0]
        kind = kinds.setdefault(KINDS.get(prefix, prefix), {"tensors": 0, "bytes": 0, "dtypes": {}})
        kind["tensors"] += 1
        kind["bytes"] += _bytes(tensor)
        kind["dtypes"][tensor.dtype] = kind["dtypes"].get(tensor.dtype, 0) + _bytes(tensor)
    return kinds


def _bytes(tensor: TensorEntry) -> int:
    return sum(piece.box.volume for piece in tensor.pieces) * DTYPES[tensor.dtype][1]


def _file_lines(files: Mapping[str, int]) -> Iterator[str]:
    width = max(map(len, files), default=0)
    label = "files"
    for name, count in list(files.items())[:SHOWN]:
        yield _fact(label, f"{name:<{width}}  {byte_size(count):>9}")
        label = ""
    if len(files) > SHOWN:
        yield _fact("", f"and {len(files) - SHOWN:,} more, {byte_size(sum(files.values()))} in all (--json lists them)")


def _tensor_lines(tensors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line per tensor, or two if its name is wide."""
    cells = [(t["dtype"], "x".join(map(str, t["shape"])) or "scalar", t["cut"], byte_size(t["bytes"])) for t in tensors]
    heads = ("dtype", "shape", "cut", "bytes")
    widths = [max(len(row[i]) for row in [heads, *cells]) for i in range(4)]
    room = columns() - sum(widths) - 2 * 4 - 2
    name_width = max(12, min(room, max(len(t["name"]) for t in tensors)))

    def line(row: tuple[str, ...]) -> str:
        *first, last = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        return "  " + "  ".join([*first, last.strip().rjust(widths[-1])])

    yield f"  {'tensor':<{name_width}}{line(heads)}"
    for tensor, row in zip(tensors, cells, strict=True):
        yield from _beside(tensor["name"], name_width, line(row))


def _beside(name: str, width: int, rest: str) -> Iterator[str]:
    if len(name) > width:
        yield _fit(f"  {name}")
        name = ""
    yield f"  {name:<{width}}{rest}"


def _fact(label: str, text: str) -> str:
    return _fit(f"{label:<10} {text}")


def _fit(line: str) -> str:
    """Cut a line in its middle to fit the width."""
    if len(line) <= columns():
        return line
    half = (columns() - 3) // 2
    return f"{line[: columns() - 3 - half]}...{line[-half:]}"


def _wrap(text: str) -> list[str]:
    return [_fit(line) for line in textwrap.wrap(text, columns(), subsequent_indent="  ", break_long_words=False)]


def _mesh(mesh: Mapping[str, int]) -> str:
    """Return the axes with more than one worker."""
    return ", ".join(f"{axis} {count}" for axis, count in mesh.items() if count > 1)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return _mesh(value) or "-"
    return "-" if value in (None, "") else str(value)
