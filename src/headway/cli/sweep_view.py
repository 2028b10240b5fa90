"""Shows a sweep: a line while it runs, a table at its end."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from headway.cli.progress import EVERY_S, Counting
from headway.cli.text import columns, duration, next_line
from headway.cluster.submit.sweep_results import SweepResult, best, ranked_by
from headway.cluster.submit.sweeps import Sweep
from headway.track import command


class SweepProgress:
    """A line on standard error: overwritten on a terminal, else printed when something has changed."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._terminal = sweep, sys.stderr.isatty()
        self._counts, self._printed_s, self._line = Counter[str](), 0.0, ""
        self._counting: Counting | None = None
        self._noted = ""

    def syncing(self, done: int, number: int) -> None:
        """Show how many runs were synced from their stores."""
        self._counting = self._counting or Counting(f"{self._sweep.name}: syncing records")
        self._counting.show(done, number)

    def note(self, text: str) -> None:
        """Print a problem whenever it changes."""
        if text and text != self._noted:
            self.end()
            self.say(f"note: {text}")
        self._noted = text

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def show(self, rows: Sequence[SweepResult]) -> None:
        """Show the states of the runs."""
        counts, self._counting = Counter(row.state for row in rows), None
        line = f"{self._sweep.name}: {_counted(counts, len(rows))}{_steps(rows)}"
        if self._terminal:
            print(f"\r\x1b[K{line[: columns() - 1]}", end="", file=sys.stderr, flush=True)
        elif line != self._line and (counts != self._counts or time.monotonic() > self._printed_s + EVERY_S):
            self.say(line[: columns()])
            self._printed_s, self._line = time.monotonic(), line
        self._counts = counts

    def end(self) -> None:
        """End the line."""
        if self._terminal:
            print(file=sys.stderr, flush=True)


def _counted(counts: Counter[str], number: int) -> str:
    others = [f"{count} {state}" for state, count in sorted(counts.items()) if state != "finished"]
    return ", ".join([f"{counts['finished']} of {number} finished", *others])


def _steps(rows: Sequence[SweepResult]) -> str:
    running = [row for row in rows if row.state == "running" and row.total_steps]
    if not running:
        return ""
    least = min(running, key=lambda row: row.step)
    return f"; step {least.step} of {least.total_steps}"


def table(root: Path, sweep: Sweep, rows: Sequence[SweepResult]) -> list[str]:
    """Return one line per run, best first and marked; wide settings come on a separate line."""
    winner = best(rows)
    figures = _figures(rows)
    settings = {name: [row.settings[key] for row in rows] for key, name in sweep.keys.items()}
    wide = 2 + sum(2 + max(map(len, [name, *values])) for name, values in (settings | figures).items()) > columns()
    lines = _aligned(figures if wide else settings | figures, left=() if wide else tuple(settings))
    marked = [
        lines[0],
        *(f"{'*' if row is winner else ' '}{line[1:]}" for row, line in zip(rows, lines[1:], strict=True)),
    ]
    if wide:
        marked = [
            marked[0],
            *(text for row, line in zip(rows, marked[1:], strict=True) for text in (line, _under(sweep, row))),
        ]
    by = {"eval_loss": "eval loss", "loss": "loss of the last step"}[ranked_by(rows)]
    verdict = [f"* the best by {by}: {winner.run}"] if winner else ["no run has finished"]
    return [*marked, *verdict, *_reasons(rows), _next(root, sweep, rows, winner)]


def _figures(rows: Sequence[SweepResult]) -> dict[str, list[str]]:
    figures = {"loss": [_loss(row.loss) for row in rows]}
    if any(row.eval_loss is not None for row in rows):
        figures["eval loss"] = [_loss(row.eval_loss) for row in rows]
    return figures | {
        "step": [f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step) for row in rows],
        "took": [duration(row.seconds) for row in rows],
        "state": [row.state for row in rows],
    }


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _aligned(cells_by_name: dict[str, list[str]], left: tuple[str, ...]) -> list[str]:
    """Return aligned columns; numbers are right-aligned."""
    widths = {name: max(map(len, [name, *values])) for name, values in cells_by_name.items()}
    to_left = {*left, "state"}

    def line(cells: Sequence[str]) -> str:
        cells = [
            f"{cell:{widths[name]}}" if name in to_left else f"{cell:>{widths[name]}}"
            for name, cell in zip(cells_by_name, cells, strict=True)
        ]
        return f"  {'  '.join(cells)}".rstrip()

    return [line(list(cells_by_name)), *(line(cells) for cells in zip(*cells_by_name.values(), strict=True))]


def _under(sweep: Sweep, row: SweepResult) -> str:
    text = "    " + " ".join(f"{sweep.keys[key]}={value}" for key, value in row.settings.items())
    return text if len(text) <= columns() else text[: columns() - 3] + "..."


def _reasons(rows: Sequence[SweepResult]) -> list[str]:
    """Return why runs failed, one line per reason."""
    alike = dict[tuple[str, str], list[str]]()
    for row in rows:
        if row.reason and row.state not in ("finished", "running"):
            alike.setdefault((row.state, row.reason), []).append(row.run)
    lines = list[str]()
    for (state, reason), runs in alike.items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        text = f"{runs[0]}{more}: {state}: {reason}"
        lines.append(text if len(text) <= columns() else text[: columns() - 3] + "...")
    return lines


def _next(root: Path, sweep: Sweep, rows: Sequence[SweepResult], winner: SweepResult | None) -> str:
    failed = next((row.run for row in rows if row.state in ("failed", "impossible")), None)
    if any(not row.over for row in rows):
        follow_ups = [f"sweep {sweep.name}", f"cancel {sweep.name}"]
    elif failed:
        follow_ups = [f"logs {failed}", f"requeue {failed}"]
    else:
        follow_ups = [f"report {winner.run}" if winner else f"logs {rows[0].run}"]
    return next_line(*(command(root, words) for words in follow_ups))


def document(sweep: Sweep, rows: Sequence[SweepResult], old: str = "") -> dict[str, object]:
    """Return a sweep as JSON-ready values; `old` is why some may be out of date."""
    winner = best(rows)
    fields = {"sweep": sweep.name, "engine": sweep.engine, "job": sweep.job, "on": sweep.on, "by": ranked_by(rows)}
    content: dict[str, object] = fields | {"best": winner and winner.run, "points": [asdict(row) for row in rows]}
    return content | {"old": old} if old else content


def sweep_lines(root: Path, sweeps: Sequence[Sweep]) -> list[str]:
    """Return one line per sweep."""
    if not sweeps:
        return [f"no sweeps in {root}", f"next: {command(root, 'sweep RECIPE --grid train.lr=1e-4,3e-4')}"]
    width = max(len("sweep"), *(len(sweep.name) for sweep in sweeps))
    head = f"{'sweep':{width}}  {'runs':>4}  {'engine':10}  {'submitted':11}  keys"
    rows = [
        f"{sweep.name:{width}}  {len(sweep.points):>4}  {sweep.engine:10}  "
        f"{time.strftime('%m-%d %H:%M', time.localtime(sweep.time)):11}  {', '.join(sweep.keys)}"[: columns()]
        for sweep in sweeps
    ]
    return [head, *rows, f"next: {command(root, 'sweep', sweeps[0].name)}"]
