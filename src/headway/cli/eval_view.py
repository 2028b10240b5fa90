"""What `headway eval` prints."""

import operator
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from headway.cli.text import columns, plural, shortened
from headway.evals.compare import Comparison
from headway.evals.session import EvalSession
from headway.track import EvalMetric, Evaluation, RunFolder


def evaluation_text(session: EvalSession, folder: RunFolder | None, out: Path | None) -> list[str]:
    """Return the table of an evaluation, notes, and what to do next."""
    evaluations = session.evaluations()
    where = f"{session.facts['dtype']} on {session.facts['device']}, " if session.facts else ""
    seconds = evaluations[0].seconds
    took = f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
    lines = [f"{session.model}: {where}{plural(session.total, 'question')} in {took}", ""]
    lines += evaluation_table(evaluations)
    notes = [*(note for entry in evaluations for note in _notes(entry)), *session.notes()]
    lines += ["", *notes] if notes else [""]
    if out is not None:
        lines.append(f"rows: {out}")
    if folder is None:
        return [part for line in lines for part in _wrap(line)]
    first = evaluations[0]
    lines.append(f"recorded: {folder.evals}")
    lines = [part for line in lines for part in _wrap(line)]
    key = shlex.quote(f"{first.key}/{first.metrics[0].name}")
    return [*lines, f"next: {folder.command('metrics', f'--key {key}')}"]


def evaluation_table(evaluations: Sequence[Evaluation], *, steps: bool = False) -> list[str]:
    """Return a row per metric of each task, in 80 columns: with the number of questions, or the checkpoint's step."""
    label = operator.attrgetter("key" if steps else "task")  # what is printed at once has the same settings
    width = min(max([4, *(len(label(entry)) for entry in evaluations)]), 18)
    head = f"{'task':{width}}  {'metric':16} {'value':>9} {'95 % interval':>20}"
    rows = [f"  {'step':>8} {head}" if steps else f"  {head} {'questions':>9}"]
    for entry in evaluations:
        for metric in entry.metrics:
            value, interval = _value(metric)
            row = f"{shortened(label(entry), width):{width}}  {metric.name:16} {value:>9} {interval:>20}"
            rows.append(f"  {entry.step or 0:>8} {row}" if steps else f"  {row} {entry.questions:>9,}")
    return rows


def comparison_text(first: str, second: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Return a sentence per metric, after the interval of the difference."""
    lines = []
    for entry in comparisons:
        lines.append(f"{entry.task} {entry.metric}: {entry.sentence(first, second)}")
        test = entry.test
        if test.low is not None and test.high is not None:
            scale, unit = (100, " points") if entry.share else (1, "")
            low, middle, high = (f"{scale * value:+.3g}" for value in (test.low, test.difference, test.high))
            lines.append(f"  difference {middle}{unit}, 95 % interval {low} to {high}")
        if not entry.same_prompts:
            lines.append("  note: the models got different prompts (examples or chat templates)")
    return [part for line in lines for part in _wrap(line)]


def _notes(entry: Evaluation) -> list[str]:
    outputs = entry.questions * entry.samples
    if not entry.cut:
        return []
    limit = entry.settings.get("max_tokens")
    return [f"{entry.task}: {entry.cut:,} of {plural(outputs, 'output')} ended at {limit} tokens (--max-tokens)"]


def _value(metric: EvalMetric) -> tuple[str, str]:
    if metric.share:
        value = f"{100 * metric.value:.1f} %"
        interval = (
            "" if metric.low is None or metric.high is None else f"{100 * metric.low:.1f} to {100 * metric.high:.1f} %"
        )
        return value, interval
    value = f"{metric.value:.4g}"
    interval = "" if metric.low is None or metric.high is None else f"{metric.low:.3g} to {metric.high:.3g}"
    return value, interval


def _wrap(line: str) -> list[str]:
    """Wrap a line at the width of the terminal, with a hanging indent; a path stays whole."""
    width = columns()
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
