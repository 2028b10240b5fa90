"""What training looks like while it runs: a live panel on a terminal, plain lines elsewhere.

Both read what the first worker records; nothing asks the workers.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.agent import Attempt
from headway.cli.text import count, duration, short_seconds
from headway.track import RunFolder, RunPlan, Tail, record_path

__all__ = ["LivePanel", "LiveStatus", "PlainLines", "RecordTail", "open_view", "plan_lines", "tell"]

PLAIN_EVERY_S = 5.0
SPEED_OVER_STEPS = 20
NOTICES = 3
"""Shown at a time on a terminal."""
GIB = 2**30
"""Data sheets call so many bytes a "GB" of device memory."""
ACCOUNTS = {
    "startup": "start-up",
    "context": "start-up",
    "restore": "start-up",
    "buffers": "start-up",
    "compile": "compile",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
}


@dataclass
class LiveStatus:
    """How a run stands, from its agent's and first worker's events so far."""

    workers: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    eval_loss: float | None = None
    eval_step: int = 0
    losses_ns: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OVER_STEPS + 1))
    notices: list[str] = field(default_factory=list)
    """What the user should know of, in the order it happened."""
    skipped: int = 0
    """Saves left out because the writer was behind."""
    _open: dict[str, int] = field(default_factory=dict)

    def follow(self, records: "RecordTail") -> None:
        """Learn what has been recorded since."""
        for event in records.poll():
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        """Learn from one event."""
        match event["kind"]:
            case "facts":
                self.facts = event
            case "step":
                self.last = event
                self.recent.append((event["t"], event["tokens"]))
                self._lose("data stall", event["data"])
            case "eval":
                self.eval_loss, self.eval_step = event["loss"], event["step"]
            case "attempt":
                self._open.clear()  # spans of a life that was cut short stay open for ever
                self.recent.clear()
            case "end" if "recovery" in event:
                self.notices.append(event["recovery"])
            case "hang" | "woken" | "adopted" | "alone" | "straggler" | "waiting" if event.get("text"):
                self.notices.append(event["text"])
            case "unsaved":
                what = "uploaded" if event["tier"] == "store" else "saved"
                self.notices.append(f"step {event['step']} was not {what}: {event['message']}")
            case "retry":
                self.notices.append(f"the last state could not be saved yet, trying again: {event['message']}")
            case "skipped":
                self.skipped += 1
                if self.skipped == 1:
                    self.notices.append(
                        f"the save of step {event['step']} is left out: the one before is still being written"
                    )
            case "begin":
                self._open[event["name"]] = event["t"]
            case "end-span" if event["name"] in self._open:
                account = ACCOUNTS.get(event["name"])
                if account:
                    self._lose(account, event["t"] - self._open.pop(event["name"]))

    def _lose(self, account: str, ns: int) -> None:
        self.losses_ns[account] = self.losses_ns.get(account, 0) + ns

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.last.get("step", 0))

    @property
    def total_steps(self) -> int:
        """Steps in all."""
        return int(self.facts.get("total_steps", 0))

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last few steps."""
        if len(self.recent) < 2:
            return None
        (first, _), (last, _) = self.recent[0], self.recent[-1]
        return sum(tokens for _, tokens in list(self.recent)[1:]) * 1e9 / max(1, last - first)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs a second over all workers' peak."""
        peak, speed = self.facts.get("peak_flops"), self.tokens_per_s
        if not peak or speed is None:
            return None
        return float(speed * self.facts["flops_per_token"] / (peak * self.workers))

    @property
    def seconds_left(self) -> float | None:
        """At the present speed."""
        speed = self.tokens_per_s
        if not speed:
            return None
        return float((self.total_steps - self.step) * self.facts["tokens_per_step"] / speed)

    @property
    def largest_loss(self) -> tuple[str, float] | None:
        """The account that has cost the first worker most, in seconds."""
        if not self.losses_ns:
            return None
        account = max(self.losses_ns, key=lambda name: self.losses_ns[name])
        return account, self.losses_ns[account] / 1e9

    def numbers(self) -> str:
        """Loss, speed and the like on one line."""
        parts = []
        for key, form in (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.2f}"), ("lr", "lr {:.2e}")):
            if key in self.last:
                value = self.last[key]
                parts.append(f"{key} not finite" if value is None else form.format(value))
        if self.eval_loss is not None:
            behind = "" if self.eval_step == self.step else f" (step {self.eval_step})"
            parts.append(f"eval {self.eval_loss:.4f}{behind}")
        if self.tokens_per_s is not None:
            parts.append(f"{count(self.tokens_per_s)} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.0%}")
        return "  ".join(parts)


def tell(line: str) -> None:
    """Write a line to standard error; when nobody reads it any more, the run goes on without."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class RecordTail:
    """What the agent and the first worker record, attempt after attempt."""

    def __init__(self, run: RunFolder, attempt: int) -> None:
        self._run = run
        self._open(attempt)

    def _open(self, attempt: int) -> None:
        self._attempt = attempt
        self._tails = [Tail(record_path(self._run.events, attempt, process)) for process in ("agent", "rank-0")]

    def poll(self) -> list[dict[str, Any]]:
        """What has been recorded since."""
        over = record_path(self._run.events, self._attempt + 1, "agent").exists()
        events = [event for tail in self._tails for event in tail.poll()]
        if over:
            self._open(self._attempt + 1)
            events += self.poll()
        return events


class PlainLines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, standing: LiveStatus, records: RecordTail, title: str) -> None:
        self._standing, self._records = standing, records
        self._printed_step = self._told = 0
        self._last_print = time.monotonic()
        self._stops = 0
        tell(title)

    def tick(self, stops_asked: int) -> None:
        """Print if it is time."""
        self._standing.follow(self._records)
        for notice in self._standing.notices[self._told :]:
            tell(f"note: {notice}")
        self._told = len(self._standing.notices)
        if stops_asked != self._stops:
            self._stops = stops_asked
            tell(stopping_line(stops_asked, self._standing.step))
        now = time.monotonic()
        if now - self._last_print >= PLAIN_EVERY_S:
            self._last_print = now
            self.line()

    def line(self) -> None:
        """Print where the run stands, if it has moved."""
        standing = self._standing
        if standing.step == self._printed_step:
            return
        self._printed_step = standing.step
        left = standing.seconds_left
        eta = f"  ETA {duration(left)}" if left else ""
        tell(f"step {standing.step}/{standing.total_steps}  {standing.numbers()}{eta}")


class LivePanel:
    """A few lines that redraw themselves."""

    def __init__(self, standing: LiveStatus, records: RecordTail, title: str, live: Live) -> None:
        self._standing, self._records, self._title, self._live = standing, records, title, live

    def tick(self, stops_asked: int) -> None:
        """Redraw."""
        self._standing.follow(self._records)
        self._live.update(self._draw(stops_asked), refresh=True)

    def _draw(self, stops_asked: int) -> Group:
        standing = self._standing
        lines: list[Any] = [Text(self._title, style="bold")]
        if standing.step == 0:
            lines.append(Text("starting: importing torch, building the model", style="dim"))
        else:
            left = standing.seconds_left
            row = Table.grid(padding=(0, 1))
            row.add_row(
                f"step {standing.step}/{standing.total_steps}",
                ProgressBar(total=standing.total_steps, completed=standing.step, width=30),
                f"{standing.step / max(1, standing.total_steps):.0%}",
                f"ETA {duration(left)}" if left is not None else "",
            )
            lines += [row, Text(standing.numbers())]
        if standing.largest_loss:
            account, seconds = standing.largest_loss
            lines.append(Text(f"largest loss of time: {account} {seconds:.1f} s", style="dim"))
        lines += [Text(notice, style="yellow") for notice in standing.notices[-NOTICES:]]
        if stops_asked:
            lines.append(Text(stopping_line(stops_asked, standing.step), style="yellow"))
        return Group(*lines)


def stopping_line(stops_asked: int, step: int = 1) -> str:
    """What happens now that a stop was asked for, at this step."""
    if step == 0:
        return "stopping before the first step"
    if stops_asked == 1:
        return "stopping: saving at the end of this step (Ctrl-C again stops at once)"
    return "stopping at once"


def plan_lines(plan: RunPlan) -> list[str]:
    """What was planned, in two lines; of an assumed chip only what does not lean on its speed."""
    mesh = " ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one worker"
    again = "no recomputation" if plan.recompute == "none" else f"{plan.recompute} recomputation"
    if plan.recompute != "none" and plan.recompute_blocks is not None:
        again += f" of {plan.recompute_blocks} blocks"
    way = [mesh, f"microbatch {plan.microbatch}", again]
    if plan.mesh.get("pipeline", 1) > 1 and plan.schedule != "1f1b":
        way.append(plan.schedule)
    way += ["weights kept"] * plan.keeps_weights + ["reduced each"] * plan.reduces_each
    figures = f"{short_seconds(plan.step_s)} a step, {plan.tokens_s:,.0f} tokens/s"
    needs, has = plan.total_bytes / GIB, plan.capacity_bytes / GIB
    if plan.assumed:
        return [f"plan: {', '.join(way)}"]
    if needs > has:
        figures = f"does not fit: it needs {needs:,.0f} GB, a device has {has:.0f} GB"
    else:
        figures += f", MFU {100 * plan.mfu:.0f} %, {needs:.0f} of {has:.0f} GB"
    return [f"plan: {', '.join(way)}", f"      {figures} (headway plan shows why)"]


@contextlib.contextmanager
def open_view(attempt: Attempt, quiet: bool) -> Iterator[LivePanel | PlainLines]:
    """The view that fits where standard error goes."""
    records = RecordTail(attempt.folder, attempt.number)
    workers = f"{attempt.workers} worker{'s' if attempt.workers > 1 else ''} on {attempt.device}"
    again = f", attempt {attempt.number}" if attempt.number > 1 else ""
    again += f", from step {attempt.from_step}" if attempt.from_step else ""
    nodes = f", {attempt.nodes} nodes" if attempt.nodes > 1 else ""
    title = f"{attempt.run.name}  {workers}{nodes}{again}"
    for note in attempt.notes:
        tell(f"note: {note}")
    standing = LiveStatus(workers=attempt.workers)
    console = Console(stderr=True)
    if console.is_terminal and not quiet:
        with Live(console=console, auto_refresh=False) as live:
            yield LivePanel(standing, records, title, live)
        return
    lines = PlainLines(standing, records, title)
    yield lines
    lines.line()
