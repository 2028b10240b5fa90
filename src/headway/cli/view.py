"""Shows a run while it trains: a live panel on a terminal, plain lines elsewhere.

Both read the records of the agent and the first worker; no worker is asked.
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
from headway.track.accounts import SPANS
from headway.track.divergence import LossMonitor

PLAIN_EVERY_S = 5.0
SPEED_OVER_STEPS = 20
SHORTEST_BAR = 10
"""A shorter progress bar is left out."""
NOTICES = 3
"""Notices shown at a time on a terminal."""
GIB = 2**30
"""What data sheets call a "GB" of device memory."""
_NUMBERS = (
    ("loss", "loss {:.4f}"),
    ("accuracy", "accuracy {:.0%}"),
    ("kl", "KL {:.4f}"),
    ("margin", "margin {:.2f}"),
    ("grad_norm", "norm {:.2f}"),
    ("lr", "lr {:.2e}"),
)
"""Metrics of a step that are shown, in order, and how."""
_POLICY_NUMBERS = (
    ("reward", "reward {:.3f}"),
    ("pass@", "{key} {:.2f}"),
    ("length", "length {:.0f}"),
    ("zero_variance", "zero-variance {:.0%}"),
    ("failed", "failed {:.0%}"),
    ("mismatch", "mismatch {:.2g}"),
    ("kl", "KL {:.4f}"),
    ("grad_norm", "norm {:.2f}"),
)
"""Those of a policy, whose loss says little."""


@dataclass
class LiveStatus:
    """State of a run, from the events of its agent and first worker so far."""

    workers: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[int, float | None] = field(default_factory=dict)
    """The loss or reward by step, without steps that were rolled back; None if not finite."""
    overhead_ns: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SPEED_OVER_STEPS + 1))
    notices: list[str] = field(default_factory=list)
    """What the user should know, in the order it happened."""
    skipped: int = 0
    """Saves skipped because the writer was behind."""
    trouble: str | None = None
    """What is wrong with the run's folder, from which the rest of this is read."""
    scored: tuple[int, int] | None = None
    """Rows that the reference model or the teacher has scored before the first step, and all of them."""
    scored_what: str = "reference log-probabilities"
    _step_in_trouble: int = 0
    _open: dict[str, int] = field(default_factory=dict)
    _spans: list[tuple[int, int]] = field(default_factory=list)
    """Beginnings and ends of the spans since the last step, without those inside others."""
    _losses: LossMonitor = field(default_factory=LossMonitor)

    def follow(self, records: "RecordTail") -> None:
        """Apply what has been recorded since; nothing is read while the folder is in trouble."""
        for event in records.poll() if self.trouble is None else ():
            self.take(event)

    def report_storage(self, trouble: str | None, step: int) -> None:
        """Take what the agent says about the run's folder."""
        if trouble is not None and trouble != self.trouble:
            self.notices.append(trouble)
        self.trouble, self._step_in_trouble = trouble, 0 if trouble is None else step

    def take(self, event: dict[str, Any]) -> None:
        """Apply one event."""
        match event["kind"]:
            case "facts":
                self.facts = event
            case "step":
                self.last = event
                self._roll_back(event["step"] - 1)
                self.recent.append((event["t"], event["tokens"]))
                self._add_waits(event)
                divergence = self._losses.add(event["step"], event.get("loss"))
                if divergence is not None:
                    self.notices.append(divergence.text)
            case "reference":
                self.scored = event["done"], event["total"]
                if event.get("of") == "teacher":
                    self.scored_what = "the teacher's likeliest tokens"
            case "eval":
                self.evaluations[event["step"]] = event.get("reward", event.get("loss"))
            case "attempt":
                self._roll_back(event.get("from_step", self.step))
                self._open.clear()  # spans of an attempt that was cut short never end
                self._spans.clear()
                self.recent.clear()
            case "log" if event.get("notice"):
                self.notices.append(event["message"])
            case "end" if "recovery" in event:
                self.notices.append(event["recovery"])
            case "hang" | "node" | "woken" | "adopted" | "alone" | "straggler" | "waiting" if event.get("text"):
                self.notices.append(event["text"])
            case "storage" if event["text"] not in self.notices:  # else the agent has said it already
                self.notices.append(event["text"])
            case "unsaved":
                what = "uploaded" if event["tier"] == "store" else "saved"
                self.notices.append(f"step {event['step']} was not {what}: {event['message']}")
            case "retry":
                limit = f" for at most {event['limit_s']:.0f} s" if "limit_s" in event else ""
                self.notices.append(f"cannot save the last state yet, retrying{limit}: {event['message']}")
            case "skipped":
                self.skipped += 1
                if self.skipped == 1:
                    self.notices.append(
                        f"skipped the save of step {event['step']}: the previous one is still being written"
                    )
            case "begin":
                self._open[event["name"]] = event["t"]
            case "end-span" if event["name"] in self._open:
                begin, end = self._open.pop(event["name"]), event["t"]
                if event["name"] in SPANS:
                    self._add_overhead(SPANS[event["name"]], end - begin - self._in_spans(begin, end))
                    self._spans = [span for span in self._spans if span[0] < begin] + [(begin, end)]

    def _roll_back(self, step: int) -> None:
        """Forget evaluations of later steps, which are done again."""
        self.evaluations = {at: value for at, value in self.evaluations.items() if at <= step}

    def _add_waits(self, step: dict[str, Any]) -> None:
        """Add what a step waited for: for data outside spans, such as of generation, and for the copy of a save."""
        data_end = step["t"] - step["compute"]
        data_begin = data_end - step["data"]
        self._add_overhead("data stall", step["data"] - self._in_spans(data_begin, data_end))
        self._add_overhead("checkpoint stall", step.get("checkpoint", 0))
        self._spans = [span for span in self._spans if span[1] > step["t"]]

    def _in_spans(self, begin: int, end: int) -> int:
        """Return how long spans took between two times; each is in its own account, as in the report."""
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in self._spans)

    def _add_overhead(self, account: str, ns: int) -> None:
        self.overhead_ns[account] = self.overhead_ns.get(account, 0) + ns

    @property
    def step(self) -> int:
        """Steps completed."""
        return max(int(self.last.get("step", 0)), self._step_in_trouble)

    @property
    def evaluated_step(self) -> int | None:
        """Step of the newest evaluation at or before this one."""
        return max((step for step in self.evaluations if step <= self.step), default=None)

    @property
    def total_steps(self) -> int:
        """Total steps."""
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
        """Model FLOPs per second over the peak of all workers; None if that peak cannot be right, as in the report."""
        peak, speed = self.facts.get("peak_flops"), self.tokens_per_s
        if not peak or speed is None:
            return None
        share = float(speed * self.facts["flops_per_token"] / (peak * self.workers))
        return share if share <= 1 else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate at the present speed."""
        speed = self.tokens_per_s
        if not speed:
            return None
        return float((self.total_steps - self.step) * self.facts["tokens_per_step"] / speed)

    @property
    def largest_overhead(self) -> tuple[str, float] | None:
        """The account that cost the first worker most, and its seconds."""
        if not any(self.overhead_ns.values()):
            return None
        account = max(self.overhead_ns, key=lambda name: self.overhead_ns[name])
        return account, self.overhead_ns[account] / 1e9

    def numbers(self) -> str:
        """Return loss, speed and the like on one line."""
        if self.trouble is not None:
            return "(numbers follow when the folder works again)"
        parts = []
        for key, form in _POLICY_NUMBERS if "reward" in self.last else _NUMBERS:
            key = next((name for name in self.last if name.startswith("pass@")), key) if key == "pass@" else key
            if key in self.last:
                value = self.last[key]
                parts.append(f"{key} not finite" if value is None else form.format(value, key=key))
        evaluated = self.evaluated_step
        if evaluated is not None:
            behind = "" if evaluated == self.step else f" (step {evaluated})"
            value = self.evaluations[evaluated]
            parts.append(f"eval {'not finite' if value is None else f'{value:.4f}'}{behind}")
        if self.tokens_per_s is not None:
            parts.append(f"{count(self.tokens_per_s)} tokens/s")
        if self.mfu is not None:
            # The report's MFU is that during updates; tokens/s, and this, also have the time of the sampling.
            parts.append(f"MFU {self.mfu:.0%}" + " with generation" * ("reward" in self.last))
        return "  ".join(parts)


def tell(line: str) -> None:
    """Write a line to standard error; a closed pipe does not stop the run."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class RecordTail:
    """Follows the records of the agent and the first worker, attempt after attempt."""

    def __init__(self, run: RunFolder, attempt: int) -> None:
        self._run = run
        self._open(attempt)

    def _open(self, attempt: int) -> None:
        self._attempt = attempt
        self._agent, self._worker = (
            Tail(record_path(self._run.events, attempt, process)) for process in ("agent", "rank-0")
        )

    def poll(self) -> list[dict[str, Any]]:
        """Return the events recorded since the last call; without the agent's spans, which have another clock."""
        try:
            over = record_path(self._run.events, self._attempt + 1, "agent").exists()
        except OSError:  # its file system is not there now
            return []
        events = [event for event in self._agent.poll() if event["kind"] not in ("begin", "end-span")]
        events += self._worker.poll()
        if over:
            self._open(self._attempt + 1)
            events += self.poll()
        return events


class PlainLines:
    """Prints a line every few seconds, for logs and pipes."""

    def __init__(self, status: LiveStatus, records: RecordTail, title: str) -> None:
        self._status, self._records = status, records
        self._noticed = 0
        self._printed: tuple[int, int | None] = (0, None)
        """Step and the step of the evaluation in the last line."""
        self._printed_scored: tuple[int, int] | None = None
        self._last_print = time.monotonic()
        self._stops = 0
        tell(title)

    def report_storage(self, trouble: str | None, step: int) -> None:
        """Show what the agent says about the run's folder."""
        self._status.report_storage(trouble, step)

    def tick(self, stops_asked: int) -> None:
        """Print if it is time to."""
        self._status.follow(self._records)
        for notice in self._status.notices[self._noticed :]:
            tell(f"note: {notice}")
        self._noticed = len(self._status.notices)
        if stops_asked != self._stops:
            self._stops = stops_asked
            tell(stopping_line(stops_asked, self._status.step))
        now = time.monotonic()
        if now - self._last_print >= PLAIN_EVERY_S:
            self._last_print = now
            self.line()

    def line(self) -> None:
        """Print step and numbers if the step, or its evaluation, is new."""
        status = self._status
        if (status.step, status.evaluated_step) == self._printed:
            if status.step == 0 and status.scored is not None and status.scored != self._printed_scored:
                self._printed_scored = status.scored
                tell(f"{status.scored_what}, computed once: {status.scored[0]} of {status.scored[1]} rows")
            return
        self._printed = status.step, status.evaluated_step
        left = status.seconds_left
        eta = f"  ETA {duration(left)}" if left and status.trouble is None else ""
        tell(f"step {status.step}/{status.total_steps}  {status.numbers()}{eta}")

    def finish(self) -> None:
        """Print what came after the last tick."""
        self._status.follow(self._records)
        self.line()


class LivePanel:
    """A few lines that redraw themselves."""

    def __init__(self, status: LiveStatus, records: RecordTail, title: str, live: Live, width: int = 80) -> None:
        self._status, self._records, self._title, self._live = status, records, title, live
        self._width = width

    def report_storage(self, trouble: str | None, step: int) -> None:
        """Show what the agent says about the run's folder."""
        self._status.report_storage(trouble, step)

    def tick(self, stops_asked: int) -> None:
        """Redraw."""
        self._status.follow(self._records)
        self._live.update(self._draw(stops_asked), refresh=True)

    def _draw(self, stops_asked: int) -> Group:
        status = self._status
        lines: list[Any] = [Text(self._title, style="bold")]
        if status.step == 0 and status.scored is not None:
            done, total = status.scored
            row, title = Table.grid(padding=(0, 1)), f"{status.scored_what}, computed once"
            row.add_row(title, ProgressBar(total=total, completed=done, width=min(20, self._width - len(title) - 8)))
            lines.append(row)
        elif status.step == 0:
            lines.append(Text("starting: importing torch, building the model", style="dim"))
        else:
            left = status.seconds_left
            steps = f"step {status.step}/{status.total_steps}"
            share = f"{status.step / max(1, status.total_steps):.0%}"
            eta = f"ETA {duration(left)}" if left is not None else ""
            row, room = Table.grid(padding=(0, 1)), self._width - len(f"{steps}  {share} {eta} ")
            bar = [ProgressBar(total=status.total_steps, completed=status.step, width=min(30, room))]
            row.add_row(steps, *(bar if room >= SHORTEST_BAR else []), share, eta)
            lines += [row, *(Text(line) for line in fill_lines(status.numbers().split("  "), self._width))]
        if status.largest_overhead:
            account, seconds = status.largest_overhead
            whose = " of rank 0" if status.workers > 1 else ""
            lines.append(Text(f"largest overhead: {account} {seconds:.1f} s{whose}", style="dim"))
        lines += [Text(notice, style="yellow") for notice in status.notices[-NOTICES:]]
        if stops_asked:
            lines.append(Text(stopping_line(stops_asked, status.step), style="yellow"))
        return Group(*lines)


def fill_lines(parts: list[str], width: int) -> list[str]:
    """Return parts joined by two spaces, in as few lines as fit a width; no part is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def stopping_line(stops_asked: int, step: int = 1) -> str:
    """Return what happens after this many stop requests at this step."""
    if step == 0:
        return "stopping before the first step"
    if stops_asked == 1:
        return "stopping: saving at the end of this step (press Ctrl-C again to stop at once)"
    return "stopping at once"


def plan_lines(plan: RunPlan) -> list[str]:
    """Return the plan in two lines; only one if the chip's speed is assumed."""
    mesh = " ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one worker"
    recomputed = "no recomputation" if plan.recompute == "none" else f"{plan.recompute} recomputation"
    if plan.recompute != "none" and plan.recompute_blocks is not None:
        recomputed += f" of {plan.recompute_blocks} blocks"
    settings = [mesh, f"microbatch {plan.microbatch}", recomputed]
    if plan.mesh.get("pipeline", 1) > 1 and plan.schedule != "1f1b":
        settings.append(plan.schedule)
    settings += ["weights kept"] * plan.keeps_weights + ["reduced each"] * plan.reduces_each
    figures = f"{short_seconds(plan.step_s)} per step, {plan.tokens_s:,.0f} tokens/s"
    needs, has = plan.total_bytes / GIB, plan.capacity_bytes / GIB
    if plan.assumed:
        return [f"plan: {', '.join(settings)}"]
    if needs > has:
        figures = f"does not fit: needs {needs:,.0f} GB per device, has {has:.0f} GB"
    else:
        figures += f", MFU {100 * plan.mfu:.0f} %, {needs:.0f} of {has:.0f} GB"
    return [f"plan: {', '.join(settings)}", f"      {figures} (headway plan shows why)"]


@contextlib.contextmanager
def open_view(attempt: Attempt, quiet: bool) -> Iterator[LivePanel | PlainLines]:
    """Open the view that suits standard error: a panel on a terminal, else lines."""
    records = RecordTail(attempt.folder, attempt.number)
    workers = f"{attempt.workers} worker{'s' if attempt.workers > 1 else ''} on {attempt.device}"
    attempt_note = f", attempt {attempt.number}" if attempt.number > 1 else ""
    attempt_note += f", from step {attempt.from_step}" if attempt.from_step else ""
    nodes = f", {attempt.nodes} nodes" if attempt.nodes > 1 else ""
    title = f"{attempt.run.name}  {workers}{nodes}{attempt_note}"
    for note in attempt.notes:
        tell(f"note: {note}")
    status = LiveStatus(workers=attempt.workers)
    console = Console(stderr=True)
    if console.is_terminal and not quiet:
        with Live(console=console, auto_refresh=False) as live:
            yield LivePanel(status, records, title, live, console.width)
        return
    lines = PlainLines(status, records, title)
    yield lines
    lines.finish()
