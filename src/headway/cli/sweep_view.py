"""How a sweep looks: a line while it goes on, a table at its end."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.cluster.submit.sweep_results import SweepResult
    from headway.cluster.submit.sweeps import Sweep

__all__ = ["Counting", "SweepProgress", "document", "sweep_lines", "table"]

WIDTH = 80
EVERY_S = 10.0
"""Between lines where there is no terminal to write one over the other."""


LONG_S = 2.0
"""What takes longer than that is told of."""


class Counting:
    """How many of something are done, on standard error, for as long as it takes and only where that is long."""

    def __init__(self, what: str) -> None:
        self._what, self._terminal = what, sys.stderr.isatty()
        self._next, self._shown = time.monotonic() + LONG_S, False

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr, flush=True)

    def show(self, done: int, number: int) -> None:
        """So many are done."""
        if time.monotonic() < self._next:
            return
        line = f"{self._what}: {done} of {number}"[: WIDTH - 1]
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{line}", end=after, file=sys.stderr, flush=True)
        self._next, self._shown = time.monotonic() + (0.1 if self._terminal else EVERY_S), True


class SweepProgress:
    """A line on standard error: written over on a terminal, else anew when something has changed."""

    def __init__(self, sweep: "Sweep") -> None:
        self._sweep, self._terminal = sweep, sys.stderr.isatty()
        self._counts, self._said, self._line = Counter[str](), 0.0, ""
        self._counting: Counting | None = None
        self._noted = ""

    def bringing(self, done: int, number: int) -> None:
        """So many runs were brought from their stores, before the next line."""
        self._counting = self._counting or Counting(f"{self._sweep.name}: records are brought from their stores")
        self._counting.show(done, number)

    def note(self, text: str) -> None:
        """Something that is wrong, as often as it changes."""
        if text and text != self._noted:
            self.end()
            self.say(f"note: {text}")
        self._noted = text

    def say(self, text: str) -> None:
        """Something once."""
        print(text, file=sys.stderr, flush=True)

    def show(self, rows: "Sequence[SweepResult]") -> None:
        """How it goes on."""
        counts, self._counting = Counter(row.state for row in rows), None
        line = f"{self._sweep.name}: {_counted(counts, len(rows))}{_steps(rows)}"
        if self._terminal:
            print(f"\r\x1b[K{line[: WIDTH - 1]}", end="", file=sys.stderr, flush=True)
        elif line != self._line and (counts != self._counts or time.monotonic() > self._said + EVERY_S):
            self.say(line[:WIDTH])
            self._said, self._line = time.monotonic(), line
        self._counts = counts

    def end(self) -> None:
        """The line is finished."""
        if self._terminal:
            print(file=sys.stderr, flush=True)


def _counted(counts: Counter[str], number: int) -> str:
    others = [f"{count} {state}" for state, count in sorted(counts.items()) if state != "finished"]
    return ", ".join([f"{counts['finished']} of {number} finished", *others])


def _steps(rows: "Sequence[SweepResult]") -> str:
    running = [row for row in rows if row.state == "running" and row.total_steps]
    if not running:
        return ""
    least = min(running, key=lambda row: row.step)
    return f"; step {least.step} of {least.total_steps}"


def table(sweep: "Sweep", rows: "Sequence[SweepResult]") -> list[str]:
    """A line a run, the best first and marked; settings on a line of their own where they are too wide."""
    from headway.cluster.submit.sweep_results import best, ranked_by

    winner = best(rows)
    columns = _columns(rows)
    settings = {name: [row.settings[key] for row in rows] for key, name in sweep.keys.items()}
    wide = 2 + sum(2 + max(map(len, [name, *values])) for name, values in (settings | columns).items()) > WIDTH
    lines = _aligned(columns if wide else settings | columns, left=() if wide else tuple(settings))
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
    told = [f"* the best by {by}: {winner.run}"] if winner else ["no run has finished"]
    return [*marked, *told, *_reasons(rows), _next(sweep, rows, winner)]


def _columns(rows: "Sequence[SweepResult]") -> dict[str, list[str]]:
    from headway.cli.text import duration

    found = {"loss": [_loss(row.loss) for row in rows]}
    if any(row.eval_loss is not None for row in rows):
        found["eval loss"] = [_loss(row.eval_loss) for row in rows]
    return found | {
        "step": [f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step) for row in rows],
        "took": [duration(row.seconds) for row in rows],
        "state": [row.state for row in rows],
    }


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _aligned(columns: dict[str, list[str]], left: tuple[str, ...]) -> list[str]:
    """Lines of columns, two blanks before each; numbers to the right."""
    widths = {name: max(map(len, [name, *values])) for name, values in columns.items()}
    to_left = {*left, "state"}

    def line(words: Sequence[str]) -> str:
        cells = [
            f"{word:{widths[name]}}" if name in to_left else f"{word:>{widths[name]}}"
            for name, word in zip(columns, words, strict=True)
        ]
        return f"  {'  '.join(cells)}".rstrip()

    return [line(list(columns)), *(line(words) for words in zip(*columns.values(), strict=True))]


def _under(sweep: "Sweep", row: "SweepResult") -> str:
    text = "    " + " ".join(f"{sweep.keys[key]}={value}" for key, value in row.settings.items())
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _reasons(rows: "Sequence[SweepResult]") -> list[str]:
    """Why runs failed, a line each; alike ones once."""
    alike = dict[tuple[str, str], list[str]]()
    for row in rows:
        if row.reason and row.state not in ("finished", "running"):
            alike.setdefault((row.state, row.reason), []).append(row.run)
    lines = list[str]()
    for (state, reason), runs in alike.items():
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        text = f"{runs[0]}{more}: {state}: {reason}"
        lines.append(text if len(text) <= WIDTH else text[: WIDTH - 3] + "...")
    return lines


def _next(sweep: "Sweep", rows: "Sequence[SweepResult]", winner: "SweepResult | None") -> str:
    failed = next((row.run for row in rows if row.state in ("failed", "impossible")), None)
    if any(not row.over for row in rows):
        return f"next: headway sweep {sweep.name}, headway cancel {sweep.name}"
    if failed:
        return f"next: headway logs {failed}, headway requeue {failed}"
    return f"next: headway report {winner.run}" if winner else f"next: headway logs {rows[0].run}"


def document(sweep: "Sweep", rows: "Sequence[SweepResult]", old: str = "") -> dict[str, object]:
    """A sweep for programs; `old` says why some of it may be."""
    from dataclasses import asdict

    from headway.cluster.submit.sweep_results import best, ranked_by

    winner = best(rows)
    fields = {"sweep": sweep.name, "engine": sweep.engine, "job": sweep.job, "on": sweep.on, "by": ranked_by(rows)}
    found: dict[str, object] = fields | {"best": winner and winner.run, "points": [asdict(row) for row in rows]}
    return found | {"old": old} if old else found


def sweep_lines(root: Path, found: "Sequence[Sweep]") -> list[str]:
    """All sweeps, a line each."""
    if not found:
        return [f"no sweeps in {root}", "next: headway sweep RECIPE --grid train.lr=1e-4,3e-4"]
    width = max(len("sweep"), *(len(one.name) for one in found))
    head = f"{'sweep':{width}}  {'runs':>4}  {'engine':10}  {'submitted':11}  over"
    rows = [
        f"{one.name:{width}}  {len(one.points):>4}  {one.engine:10}  "
        f"{time.strftime('%m-%d %H:%M', time.localtime(one.time)):11}  {', '.join(one.keys)}"[:WIDTH]
        for one in found
    ]
    return [head, *rows, f"next: headway sweep {found[0].name}"]
