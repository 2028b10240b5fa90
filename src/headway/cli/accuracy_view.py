"""Formats `headway plan --against`: tables of errors by group, source and chip."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from headway.cli.plan_text import cells_of, cut, wrapped
from headway.cli.text import columns
from headway.plan.accuracy.score import AccuracyReport, ScoredRun, Scores


def against_lines(report: AccuracyReport) -> list[str]:
    """Return tables by group, by source and chip, what was skipped, and the worst predictions."""
    unit = "milliseconds per step" if report.iterations else "tokens per second and device"
    modelled = sum(row.case is not None for row in report.rows)
    lines = [f"{modelled:,} of {len(report.rows):,} lines predicted: {unit}; errors are relative", ""]
    titles = {
        "groups": "groups",
        "unseen": "(a) unseen: not fitted to any run of the program",
        "calibrated": f"(b) calibrated on {report.calibrated_on} lines of the source, seed {report.seed}; the rest",
        "fitted on all": "(c) fitted on all published runs",
    }
    for name, title in titles.items():
        lines += [*_scores(title, report.tables.get(name, {}), name == "groups"), ""]
    lines += [*_skipped(report.rows), *_worst(report.rows)]
    return [*lines, "next: headway plan RECIPE --on h100x8x4"]


def _scores(title: str, table: Mapping[str, Scores], groups: bool) -> Iterator[str]:
    heads = ["lines", "mean", "median", "p90", "bias", "Spearman"]
    widths = [6, 7, 8, 7, 7, 9]
    room = columns() - 2 - sum(widths)
    yield title
    if not table:
        yield "  no source has enough lines"
        return
    yield f"  {'':<{room}}" + cells_of(heads, widths)
    for key, scores in table.items():
        name = key if groups else _source_and_chip(key, room - 1)
        rank = "-" if scores.spearman is None else f"{scores.spearman:.3f}"
        shares = [f"{scores.mean:.1%}", f"{scores.median:.1%}", f"{scores.p90:.1%}", f"{scores.bias:+.1%}"]
        yield f"  {cut(name, room - 1):<{room}}" + cells_of([f"{scores.count:,}", *shares, rank], widths)


def _source_and_chip(key: str, width: int) -> str:
    source, _, chip = key.rpartition(" | ")
    return f"{short_source(source, width - len(chip) - 1)} {chip}"


def short_source(source: str, width: int) -> str:
    """Return a source's project and the text in its brackets, else its file, within a width."""
    words = source.split()
    first = words[0] if words else ""
    if "/" not in first:
        return cut(source, width)
    project = first.split("/")[1]
    bracket = min((index for index in (source.find("["), source.find("(")) if index >= 0), default=-1)
    if bracket >= 0:
        inner = source[bracket + 1 : source.rfind("]" if source[bracket] == "[" else ")")]
        return cut(f"{project} {_plain(inner)}", width)
    return cut(" ".join([project, *(word.rpartition("/")[2] for word in words[1:])]), width)


def _plain(text: str) -> str:
    """Remove words that are in every line of such a table."""
    for common in (" NeMo Container;", " Pre-Training", " Performance"):
        text = text.replace(common, "")
    return text


def _skipped(rows: Sequence[ScoredRun]) -> Iterator[str]:
    reasons = Counter(row.skipped for row in rows if row.skipped)
    if reasons:
        yield f"skipped {sum(reasons.values()):,} lines"
        for reason, number in reasons.most_common():
            yield from wrapped(f"{number:6,}  {reason}", 8)
        yield ""


def _worst(rows: Sequence[ScoredRun]) -> Iterator[str]:
    """Yield the ten largest errors among the unseen."""
    errors = [
        (row.by_table["unseen"] / row.measured - 1, row)
        for row in rows
        if row.measured and row.by_table and "unseen" in row.by_table
    ]
    if not errors:
        return
    yield "largest errors, unseen"
    yield f"  {'line':>5}  {'source and chip':<38}{'measured':>11}{'predicted':>11}{'error':>9}"
    for error, row in sorted(errors, key=lambda pair: -abs(pair[0]))[:10]:
        assert row.by_table is not None, "rows without predictions were left out"
        name = _source_and_chip(f"{row.source} | {row.chip}", 37)
        yield f"  {row.row:>5}  {name:<38}{row.measured:>11,.0f}{row.by_table['unseen']:>11,.0f}{error:>+9.1%}"
    yield ""
