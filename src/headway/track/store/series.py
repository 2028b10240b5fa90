"""Metrics of many runs: each as far as its history goes, downsampled from the widest buckets that are narrow enough.

What a failure rolled back is left out, as in `track/metrics.py`: an attempt counts up to the step that a later one went
on from. Parts of records whose steps follow one another are put side by side; where they overlap, as after a restart
that did not say where it began, all their steps are read, and of a step done twice the later one counts.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from headway.track.events import read_ends, record_path
from headway.track.metrics import beside_steps, keep_latest
from headway.track.run_folder import RunFolder
from headway.track.store.compact import MetricStore, SegmentPart
from headway.track.store.parquet import LEVELS_FROM, read_levels, read_steps
from headway.track.store.pyramid import (
    FAN,
    Buckets,
    bucket_width,
    combine,
    concatenate,
    level_below,
    single_steps,
    statistics,
    take,
    to_view,
)
from headway.track.store.segments import KeyRange, series_digest
from headway.track.store.view import MetricStats, SeriesView

_LAST = 1 << 62


@dataclass(frozen=True)
class _Piece:
    """One metric in one part of a run, as far as it counts."""

    part: SegmentPart
    key: str
    range: KeyRange
    limit: int
    """The last step that counts."""
    scale: float

    @property
    def last(self) -> int:
        return min(self.range.last, self.limit)

    def is_whole(self, first: int, last: int) -> bool:
        """Whether all of it counts, and lies between two steps."""
        return first <= self.range.first and self.range.last <= min(self.limit, last)


def read_series(
    runs: Sequence[RunFolder],
    key: str,
    *,
    first: int | None = None,
    last: int | None = None,
    points: int | None = None,
    store: MetricStore | None = None,
) -> list[SeriesView]:
    """Return one metric of some runs, one view per run in their order, empty where a run has none.

    From step `first` to `last`, both included (default: all), in at most `points` buckets per run (by default one per
    step; at least 2). Whoever asks repeatedly passes the same `store`, so that only new lines of a live run are parsed.
    """
    store = MetricStore() if store is None else store
    pieces, loaded = _buckets_of(
        store, runs, key, -_LAST if first is None else first, _LAST if last is None else last, points
    )
    views = []
    for run, own, (buckets, width) in zip(runs, pieces, loaded, strict=True):
        if not own and (outside := beside_steps(run, [key]).get(key)) is not None:
            buckets = _between(single_steps(*outside), first, last)
        views.append(to_view(run.name, key, buckets, points, width))
    return views


def metric_keys(run: RunFolder, *, store: MetricStore | None = None) -> list[str]:
    """Return the names of a run's metrics: those recorded in the order of their first value, then derived ones."""
    parts = (store or MetricStore()).parts([run])[0]
    return list(_keys(run, parts) | dict.fromkeys(beside_steps(run)))


def metric_statistics(runs: Sequence[RunFolder], *, store: MetricStore | None = None) -> list[dict[str, MetricStats]]:
    """Return the statistics of every metric of some runs, mostly without reading their steps."""
    store = MetricStore() if store is None else store
    tables = []
    for run, parts in zip(runs, store.parts(runs), strict=True):
        table = dict[str, MetricStats]()
        for key in _keys(run, parts):
            own = _pieces(run, parts, key)
            if _follow(own) and all(piece.is_whole(-_LAST, _LAST) for piece in own):
                table[key] = _combined(own)
            else:
                buckets = _buckets_of(store, [run], key, -_LAST, _LAST, None)[1][0][0]
                table[key] = statistics(buckets.steps, buckets.mean)
        tables.append({key: statistics(*series) for key, series in beside_steps(run).items()} | table)
    return tables


def _keys(run: RunFolder, parts: Sequence[SegmentPart]) -> dict[str, None]:
    recorded = dict.fromkeys(key for part in parts for key in part.keys)
    derived = [key for key in ("step_s", "data_s", "tokens_per_s") if key in recorded]
    evaluated = [key for key in recorded if key.startswith("eval_")]
    mfu = ["mfu"] if _pieces(run, parts, "mfu") else []
    first = [key for key in recorded if key not in derived and key not in evaluated]
    return dict.fromkeys([*first, *derived, *mfu, *evaluated])


# -- what counts


def _pieces(run: RunFolder, parts: Sequence[SegmentPart], key: str) -> list[_Piece]:
    """Return the pieces of a metric, by attempt and position; MFU is the speed times a factor of the attempt."""
    kept, source = _kept(parts), "tokens_per_s" if key == "mfu" else key
    factors = _mfu_factors(run, parts) if key == "mfu" else {}
    pieces = []
    for part in parts:
        extent, limit = part.keys.get(source), kept.get(part.attempt, _LAST)
        scale = factors.get(part.attempt, math.nan) if key == "mfu" else 1.0
        if extent is not None and extent.first <= limit and math.isfinite(scale):
            pieces.append(_Piece(part, source, extent, limit, scale))
    return pieces


def _kept(parts: Sequence[SegmentPart]) -> dict[int, int]:
    """Return, for each attempt that was rolled back, the last of its steps that still counts."""
    resumed = {part.attempt: part.resumed for part in parts if part.resumed is not None}
    attempts = {part.attempt for part in parts}
    later = {number: [step for other, step in resumed.items() if other > number] for number in attempts}
    return {number: min(steps) for number, steps in later.items() if steps}


def _mfu_factors(run: RunFolder, parts: Sequence[SegmentPart]) -> dict[int, float]:
    """Return what a speed in tokens per second is multiplied with, by attempt; nothing where it is not known."""
    facts = {part.attempt: part.facts for part in parts if part.facts}
    factors = {}
    for attempt, values in facts.items():
        flops, peak, workers = values.get("flops_per_token"), values.get("peak_flops"), _workers(run, attempt)
        if flops and peak and workers:
            factors[attempt] = flops / (peak * workers)
    return factors


def _workers(run: RunFolder, attempt: int) -> int | None:
    with suppress(OSError):
        events = read_ends(record_path(run.events, attempt, "agent")).events
        counts = [event.get("workers") for event in events if event["kind"] == "attempt"]
        return counts[-1] if counts and type(counts[-1]) is int else None
    return None


def _follow(pieces: Sequence[_Piece]) -> bool:
    """Whether the steps of each piece come after those of the one before it."""
    return all(a.last < b.range.first for a, b in pairwise(pieces))


def _combined(pieces: Sequence[_Piece]) -> MetricStats:
    """Return the statistics of pieces that follow one another, from those of each."""
    several = [piece.range.stats for piece in pieces]
    scales = [piece.scale for piece in pieces]
    count = sum(stats.count for stats in several)
    last = None if several[-1].last is None else several[-1].last * scales[-1]
    pairs = [(stats, scale) for stats, scale in zip(several, scales, strict=True) if stats.count]
    if not count:
        return MetricStats(last, None, None, None, 0)
    return MetricStats(
        last,
        min((stats.minimum or 0.0) * scale for stats, scale in pairs),
        max((stats.maximum or 0.0) * scale for stats, scale in pairs),
        sum((stats.mean or 0.0) * scale * stats.count for stats, scale in pairs) / count,
        count,
    )


# -- reading


def _buckets_of(
    store: MetricStore, runs: Sequence[RunFolder], key: str, first: int, last: int, points: int | None
) -> tuple[list[list[_Piece]], list[tuple[Buckets, int]]]:
    """Return the pieces of a metric in each run, and its buckets between two steps with their width.

    Where files are damaged, or another process removes them meanwhile, they are made again, and at last done without.
    """
    for attempt in range(3):
        parts = store.parts(runs, from_records=attempt == 2)
        pieces = [_pieces(run, own, key) for run, own in zip(runs, parts, strict=True)]
        loaded = _load(store, pieces, first, last, points)
        if loaded is not None:
            return pieces, loaded
    raise AssertionError("records are read without files")


def _load(
    store: MetricStore, runs: Sequence[Sequence[_Piece]], first: int, last: int, points: int | None
) -> list[tuple[Buckets, int]] | None:
    """Return each run's buckets between two steps, and how wide they are; None if some files were damaged."""
    plans = [_plan(pieces, first, last, points) for pieces in runs]
    wanted = [(piece, level) for plan, _ in plans for piece, level in plan]
    loaded = _read(store, wanted, first, last)
    if loaded is None:
        return None
    results, at = list[tuple[Buckets, int]](), 0
    for (plan, width), pieces in zip(plans, runs, strict=True):
        parts, at = loaded[at : at + len(plan)], at + len(plan)
        if not _follow(pieces):
            results.append((single_steps(*keep_latest([(part.steps, part.mean) for part in parts])), 1))
        else:
            joined = concatenate(parts)
            results.append((combine(joined, width) if width > 1 else joined, width))
    return results


def _plan(pieces: Sequence[_Piece], first: int, last: int, points: int | None) -> tuple[list[tuple[_Piece, int]], int]:
    """Return which level of each piece is read, and the width of that level; level 0 is every step."""
    inside = [piece for piece in pieces if piece.range.first <= last and piece.last >= first]
    if not inside:
        return [], 1
    begin, end = max(first, inside[0].range.first), min(last, max(piece.last for piece in inside))
    width = level_below(bucket_width(end - begin + 1, points))
    if not _follow(pieces) or width == 1:
        return [(piece, 0) for piece in inside], 1
    level = round(math.log(width, FAN))
    levels = [
        level if piece.part.levels_path and piece.range.points >= LEVELS_FROM and piece.is_whole(first, last) else 0
        for piece in inside
    ]
    return list(zip(inside, levels, strict=True)), width


def _read(store: MetricStore, wanted: Sequence[tuple[_Piece, int]], first: int, last: int) -> list[Buckets] | None:
    """Return the buckets of each piece, in one query per column or level."""
    import duckdb

    results: list[Buckets | None] = [None] * len(wanted)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, (piece, level) in enumerate(wanted):
        if piece.part.data is not None:
            steps, values = piece.part.data.series[piece.key]
            results[index] = _counted(piece, single_steps(steps, values * piece.scale), first, last)
        else:
            column = piece.key if level else piece.part.columns[piece.key]
            groups.setdefault((column, level), []).append(index)
    damaged = list[Path]()
    for (column, level), indices in groups.items():
        paths = [_file(wanted[index][0], level) for index in indices]
        try:
            loaded = _query(store, paths, column, level)
        except duckdb.Error:
            bad = [path for path in paths if not _is_readable(store, path, column, level)]
            damaged += bad or paths
            continue
        for index, path, buckets in zip(indices, paths, loaded, strict=True):
            piece = wanted[index][0]
            if not _is_as_written(piece.range, buckets, level):
                damaged.append(path)
            results[index] = _counted(piece, _scaled(buckets, piece.scale), first, last)
    if damaged:
        for piece, level in wanted:
            if piece.part.path is not None and _file(piece, level) in damaged:
                store.forget([path for path in (piece.part.levels_path, piece.part.path) if path is not None])
        return None
    return [buckets for buckets in results if buckets is not None]


def _file(piece: _Piece, level: int) -> Path:
    path = piece.part.levels_path if level else piece.part.path
    assert path is not None
    return path


def _query(store: MetricStore, paths: list[Path], column: str, level: int) -> list[Buckets]:
    if level:
        return read_levels(store.database, paths, column, level)
    return [single_steps(*series) for series in read_steps(store.database, paths, column)]


def _is_readable(store: MetricStore, path: Path, column: str, level: int) -> bool:
    import duckdb

    try:
        _query(store, [path], column, level)
    except duckdb.Error:
        return False
    return True


def _is_as_written(expected: KeyRange, buckets: Buckets, level: int) -> bool:
    """Whether what was read is what was written: all of it for steps, extremes and counts for levels."""
    import numpy as np

    if not level:
        return series_digest(buckets.steps, buckets.mean) == expected.digest
    stats = expected.stats
    if not len(buckets.steps) or int(buckets.count.sum()) != stats.count:
        return False
    if not stats.count:
        return True
    return (np.nanmin(buckets.minimum), np.nanmax(buckets.maximum)) == (stats.minimum, stats.maximum)


def _scaled(buckets: Buckets, scale: float) -> Buckets:
    if scale == 1.0:
        return buckets
    return replace(buckets, minimum=buckets.minimum * scale, maximum=buckets.maximum * scale, mean=buckets.mean * scale)


def _counted(piece: _Piece, buckets: Buckets, first: int, last: int) -> Buckets:
    """Return what counts of a piece between two steps."""
    return buckets if piece.is_whole(first, last) else _between(buckets, first, min(last, piece.limit))


def _between(buckets: Buckets, first: int | None, last: int | None) -> Buckets:
    import numpy as np

    begin = 0 if first is None else int(np.searchsorted(buckets.steps, first))
    end = len(buckets.steps) if last is None else int(np.searchsorted(buckets.steps, last, side="right"))
    return take(buckets, slice(begin, end))
