"""How `headway plan --against` looks: tables of errors, by group, source and chip."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from headway.cli.plan_view import WIDTH, cells_of, cut, wrapped
from headway.plan.accuracy.score import AccuracyReport, ScoredRun, Scores

__all__ = ["against_lines", "short_source"]


def against_lines(found: AccuracyReport) -> list[str]:
    """The groups that goals are set for, the tables by source and chip, what was skipped, and the worst lines."""
    unit = "milliseconds of a step" if found.iterations else "tokens a second and device"
    modelled = sum(row.case is not None for row in found.rows)
    lines = [f"{modelled:,} of {len(found.rows):,} lines predicted: {unit}; errors are relative", ""]
    titles = {
        "groups": "groups",
        "unseen": "(a) unseen: no run of the program was fitted",
        "calibrated": f"(b) calibrated on {found.calibrated_on} lines of the source, seed {found.seed}; the rest",
        "fitted on all": "(c) fitted on all published runs",
    }
    for name, title in titles.items():
        lines += [*_scores(title, found.tables.get(name, {}), name == "groups"), ""]
    lines += [*_skipped(found.rows), *_worst(found.rows)]
    return [*lines, "next: headway plan RECIPE --on h100x8x4"]


def _scores(title: str, table: Mapping[str, Scores], groups: bool) -> Iterator[str]:
    heads = ["lines", "mean", "median", "p90", "bias", "Spearman"]
    widths = [6, 7, 8, 7, 7, 9]
    room = WIDTH - 2 - sum(widths)
    yield title
    if not table:
        yield "  no source has lines enough"
        return
    yield f"  {'':<{room}}" + cells_of(heads, widths)
    for key, one in table.items():
        name = key if groups else _source_and_chip(key, room - 1)
        rank = "-" if one.spearman is None else f"{one.spearman:.3f}"
        shares = [f"{one.mean:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"]
        yield f"  {cut(name, room - 1):<{room}}" + cells_of([f"{one.count:,}", *shares, rank], widths)


def _source_and_chip(key: str, width: int) -> str:
    source, _, chip = key.rpartition(" | ")
    return f"{short_source(source, width - len(chip) - 1)} {chip}"


def short_source(source: str, width: int) -> str:
    """A source's project and what its brackets say, or its file where there are none, within so many columns."""
    words = source.split()
    first = words[0] if words else ""
    if "/" not in first:
        return cut(source, width)
    project = first.split("/")[1]
    opened = min((place for place in (source.find("["), source.find("(")) if place >= 0), default=-1)
    if opened >= 0:
        inner = source[opened + 1 : source.rfind("]" if source[opened] == "[" else ")")]
        return cut(f"{project} {_plain(inner)}", width)
    return cut(" ".join([project, *(word.rpartition("/")[2] for word in words[1:])]), width)


def _plain(words: str) -> str:
    """Without what every line of such a table says."""
    for known in (" NeMo Container;", " Pre-Training", " Performance"):
        words = words.replace(known, "")
    return words


def _skipped(rows: Sequence[ScoredRun]) -> Iterator[str]:
    reasons = Counter(row.skipped for row in rows if row.skipped)
    if reasons:
        yield f"skipped {sum(reasons.values()):,} lines"
        for reason, number in reasons.most_common():
            yield from wrapped(f"{number:6,}  {reason}", 8)
        yield ""


def _worst(rows: Sequence[ScoredRun]) -> Iterator[str]:
    """Of the unseen ones."""
    errors = [
        (row.by_table["unseen"] / row.measured - 1, row)
        for row in rows
        if row.measured and row.by_table and "unseen" in row.by_table
    ]
    if not errors:
        return
    yield "farthest off, unseen"
    yield f"  {'line':>5}  {'source and chip':<38}{'measured':>11}{'predicted':>11}{'error':>9}"
    for error, row in sorted(errors, key=lambda pair: -abs(pair[0]))[:10]:
        assert row.by_table is not None, "rows without predictions were left out"
        name = _source_and_chip(f"{row.source} | {row.chip}", 37)
        yield f"  {row.row:>5}  {name:<38}{row.measured:>11,.0f}{row.by_table['unseen']:>11,.0f}{error:>+9.1%}"
    yield ""
