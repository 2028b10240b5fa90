"""Durations, sizes and frame rates of files or of a dataset, without decoding them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.data.media.dataset import open_media
from headway.data.media.decode import EMPTY, IMAGE_FORMATS, Undecodable, image_reason, need, open_video, reason_of
from headway.data.media.manifest import Kind, is_media
from headway.data.media.sources import SUFFIXES, other_kind
from headway.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MediaFacts:
    """What the headers of files say, as columns."""

    path: str
    kind: Kind
    width: list[int]
    height: list[int]
    duration_s: list[float]
    """Of videos."""
    fps: list[float]
    """Of videos."""
    bytes: int
    unreadable: dict[str, str]
    other_files: int = 0
    """Files of the other kind in the folder, which are left out."""

    def __len__(self) -> int:
        return len(self.width)


def probe_media(path: Path, kind: Kind | None = None, on_file: Callable[[int, int], None] | None = None) -> MediaFacts:
    """Return the facts of a dataset, of a file, or of the files in a folder that are of the kind most are."""
    if is_media(path):
        dataset = open_media(path, verify="sizes")
        columns = {name: dataset.column(name).tolist() for name in ("width", "height", "duration_s", "fps")}
        return MediaFacts(str(path), dataset.kind, bytes=dataset.manifest.bytes, unreadable={}, **columns)
    if not path.exists():
        raise DataError(f"{path} does not exist", hint="name a folder of files, a file, or a dataset")
    files = {each: _files(path, each) for each in ("video", "image")}
    kind = kind or ("video" if len(files["video"]) >= max(len(files["image"]), 1) else "image")
    if not files[kind]:
        what = f"is no {kind} file" if path.is_file() else f"holds no {kind} file"
        raise DataError(f"{path} {what}", hint=f"known: {', '.join(SUFFIXES[kind])}")
    others = len(set(files[other_kind(kind)]) - set(files[kind]))
    facts = MediaFacts(str(path), kind, [], [], [], [], sum(file.stat().st_size for file in files[kind]), {}, others)
    for number, file in enumerate(files[kind]):
        try:
            _add(facts, file)
        except (Undecodable, OSError) as error:
            if path == file:
                raise DataError(f"cannot read {path}: {reason_of(error)}") from None
            facts.unreadable[str(file.relative_to(path))] = reason_of(error)
        if on_file is not None:
            on_file(number + 1, len(files[kind]))
    return facts


def _files(folder: Path, kind: Kind) -> list[Path]:
    if folder.is_file():
        return [folder] if folder.suffix.lower() in SUFFIXES[kind] else []
    root = folder.resolve()
    files = (Path(at, name) for at, _, names in os.walk(root) for name in names)  # follows no link to a folder
    chosen = (file for file in files if file.suffix.lower() in SUFFIXES[kind] and not file.is_symlink())
    return sorted(folder / file.relative_to(root) for file in chosen)


def _add(facts: MediaFacts, file: Path) -> None:
    if not file.stat().st_size:
        raise Undecodable(EMPTY)
    if facts.kind == "image":
        image_module = need("PIL.Image")
        try:
            with file.open("rb") as content, image_module.open(content, formats=IMAGE_FORMATS) as image:
                facts.width.append(image.width)
                facts.height.append(image.height)
        except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
            raise Undecodable(image_reason(error)) from None
        return
    with open_video(file.read_bytes()) as (container, stream):
        duration = stream.duration * stream.time_base if stream.duration and stream.time_base else None
        seconds = float(duration) if duration is not None else (container.duration or 0) / 1_000_000
        facts.width.append(stream.width)
        facts.height.append(stream.height)
        facts.duration_s.append(seconds)
        facts.fps.append(float(stream.average_rate or 0.0))


def histogram(values: Sequence[float], most: int = 8) -> list[tuple[float, float, int]]:
    """Return (from, to, count) of at most so many ranges of round width; of few different values, one each."""
    different = sorted(set(values))
    if len(different) <= most:
        return [(value, value, sum(other == value for other in values)) for value in different]
    low, high = different[0], different[-1]
    power = 10.0 ** np.floor(np.log10((high - low) / most))
    width = next(step * power for step in (1, 2, 5, 10, 20) if (high - low) / (step * power) < most - 1)
    first = np.floor(low / width)
    edges = [(first + index) * width for index in range(int((high / width) - first) + 2)]
    counts, _ = np.histogram(values, edges)
    return [(float(a), float(b), int(count)) for a, b, count in zip(edges, edges[1:], counts, strict=False)]


def plot_media(facts: MediaFacts, out: Path) -> None:
    """Draw the histograms, and sizes as points, into a file."""
    media_figure(facts).savefig(out, dpi=120)


def media_figure(facts: MediaFacts) -> "Figure":
    """Return the histograms, and sizes as points; axes of sizes, and of values that are all equal, start at 0."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("plots need matplotlib, which is not installed", hint="pip install 'headway[plot]'") from None
    panels = _panels(facts)
    figure = Figure(figsize=(3.6 * (len(panels) + 1), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels) + 1, squeeze=False)[0]
    for axis, (title, values) in zip(axes, panels, strict=False):
        equal = len(set(values)) == 1
        axis.hist(values, bins=31, range=(0, 2 * values[0] or 1) if equal else None, color="#3b6ea5")
        if equal:
            axis.set_xlim(left=0)
        axis.set_xlabel(title)
        axis.set_ylabel("files")
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[-1].scatter(facts.width, facts.height, s=10, alpha=0.5, color="#3b6ea5")
    axes[-1].set_xlabel("width, pixels")
    axes[-1].set_ylabel("height, pixels")
    axes[-1].set_xlim(left=0)
    axes[-1].set_ylim(bottom=0)
    return figure


def _panels(facts: MediaFacts) -> list[tuple[str, list[float]]]:
    if facts.kind == "image":
        pixels = [float(w * h) for w, h in zip(facts.width, facts.height, strict=True)]
        if max(pixels, default=0) < 1e5:
            return [("pixels", pixels)]
        return [("megapixels", [number / 1e6 for number in pixels])]
    return [("duration, seconds", facts.duration_s), ("frames per second", facts.fps)]
