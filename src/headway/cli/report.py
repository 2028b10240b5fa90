"""`headway report RUN`: where every device-second of a run went, what it cost, and what to try."""

import textwrap
import time
from typing import TYPE_CHECKING, Any

from headway.cli.options import Json, Run, Runs

if TYPE_CHECKING:
    from headway.track import AttemptTime, Ledger, Record, RunFolder, RunSummary

__all__ = ["report"]


def report(run: Run, runs: Runs = None, json: Json = False) -> None:
    """Say where a run's time went.

    Every device-second is in one account; then the largest loss, what happened, the chain and digest.
    """
    from headway.cli.text import print_json
    from headway.track import account, find_run, read_run, runs_root, summarize

    folder = find_run(runs_root(runs), run)
    records = read_run(folder)
    ledger, exact = account(records), _exact(records)
    if json:
        print_json(_document(folder, summarize(folder), ledger, exact))
    else:
        peak = _facts(records).get("peak_source") or "the device's peak"
        print("\n".join(_text(summarize(folder), ledger, exact, str(peak), _damage(records))))


def _text(summary: "RunSummary", ledger: "Ledger", exact: dict[str, Any], peak: str, damage: list[str]) -> list[str]:
    lines = [_title(summary, ledger), "", *_accounts(ledger), "", *_useful(ledger, peak), *_loss(ledger)]
    if ledger.incidents:
        lines.append("incidents:")
        lines += [f"  {_clock(incident.wall)}  {incident.text}" for incident in ledger.incidents]
    lines += damage
    if exact["chain"]:
        lines.append(f"exact: chain {exact['chain']} at step {exact['step']}")
    if exact["digest"]:
        lines.append(f"       digest {exact['digest']} at step {exact['digest_step']}")
    if len(ledger.attempts) > 1:
        lines += ["attempts:", *(_attempt(attempt) for attempt in ledger.attempts)]
    lines.append(f"next: headway metrics {summary.name} --key loss")
    return [part for line in lines for part in _wrap(line)]


def _damage(records: "list[Record]") -> list[str]:
    """What of the record could not be read: figures that lean on it are off."""
    return [
        f"record: {record.skipped} unreadable line{'s' * (record.skipped != 1)} in attempt {record.header.attempt}'s "
        f"{record.header.process}; the figures lean on what is left"
        for record in records
        if record.skipped
    ]


def _wrap(line: str) -> list[str]:
    """Break what is longer than a terminal is wide; the rest lines up under its beginning."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, 80, subsequent_indent=indent, drop_whitespace=True) if len(line) > 80 else [line]


def _title(summary: "RunSummary", ledger: "Ledger") -> str:
    from headway.cli.text import duration

    attempts = f"{summary.attempts} attempt{'s' * (summary.attempts != 1)}"
    workers = summary.workers or 0
    devices = f"{workers} worker{'s' * (workers != 1)} x {summary.device or '?'}"
    took = duration(sum(attempt.length_ns for attempt in ledger.attempts) / 1e9)
    return f"{summary.name}  {summary.state}, step {summary.step} in {attempts}, {devices}, {took}"


def _accounts(ledger: "Ledger") -> list[str]:
    rows = [f"  {'account':18} {'device-seconds':>15} {'share':>9}"]
    for name in ledger.accounts:
        rows.append(f"  {name:18} {ledger.seconds(name):15,.1f} {ledger.share(name):9.1%}")
    return [*rows, f"  {'total':18} {ledger.total_ns / 1e9:15,.1f} {1 if ledger.total_ns else 0:9.1%}"]


def _useful(ledger: "Ledger", peak: str) -> list[str]:
    """The two conventions side by side; nothing where no peak is known."""
    if ledger.useful_ns is None or ledger.mfu is None:
        return []
    share = ledger.useful_ns / ledger.total_ns if ledger.total_ns else 0.0
    lines = [f"useful: {ledger.useful_ns / 1e9:,.1f} device-seconds at peak, {share:.1%} of all ({peak})"]
    full = "" if ledger.mfu_full_attention is None else f"; {ledger.mfu_full_attention:.1%} counting full attention"
    return [*lines, f"MFU: {ledger.mfu:.1%} during steps, causal attention counted half{full}"]


def _loss(ledger: "Ledger") -> list[str]:
    from headway.track import largest_loss

    loss = largest_loss(ledger)
    if loss is None:
        return []
    share = ledger.share(loss.account)
    return [f"largest loss: {loss.account}, {loss.seconds:,.1f} device-seconds, {share:.1%}.", f"  {loss.advice}"]


def _attempt(attempt: "AttemptTime") -> str:
    from headway.cli.text import duration

    begun = "-" if attempt.resumed_from is None else f"after step {attempt.resumed_from}"
    first = f"  {attempt.number}  {_clock(attempt.wall)}  {duration(attempt.length_ns / 1e9)}"
    first += f"  {len(attempt.workers)} x {attempt.device or '?'}  {begun:16}"
    return f"{first}  {attempt.outcome or 'no end recorded'}"


def _clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _facts(records: "list[Record]") -> dict[str, Any]:
    events = [event for record in records if record.header.rank == 0 for event in record.events]
    return next((event for event in reversed(events) if event["kind"] == "facts"), {})


def _exact(records: "list[Record]") -> dict[str, Any]:
    """The last link of the chain and the last checkpoint's digest."""
    from headway.track import checkpoint_digests, history

    steps, digests = history(records), checkpoint_digests(records)
    last, saved = steps[-1] if steps else {}, max(digests, default=None)
    digest = None if saved is None else digests[saved]
    return {"step": last.get("step"), "chain": last.get("chain"), "digest_step": saved, "digest": digest}


def _document(folder: "RunFolder", summary: "RunSummary", ledger: "Ledger", exact: dict[str, Any]) -> dict[str, Any]:
    """Everything the text shows and the numbers behind it, for programs."""
    from headway.track import largest_loss

    loss = largest_loss(ledger)
    attempts = [
        {
            "number": attempt.number,
            "started": attempt.wall,
            "seconds": attempt.length_ns / 1e9,
            "device": attempt.device,
            "outcome": attempt.outcome,
            "reason": attempt.reason,
            "resumed_from": attempt.resumed_from,
            "workers_ns": [dict(worker) for worker in attempt.workers],
        }
        for attempt in ledger.attempts
    ]
    return {
        "run": folder.name,
        "state": summary.state,
        "step": summary.step,
        "total_steps": summary.total_steps,
        "steps": ledger.steps,
        "lost_steps": ledger.lost_steps,
        "accounts_ns": dict(ledger.accounts),
        "total_ns": ledger.total_ns,
        "shares": {name: ledger.share(name) for name in ledger.accounts},
        "useful_ns": ledger.useful_ns,
        "useful_full_attention_ns": ledger.useful_full_attention_ns,
        "mfu": ledger.mfu,
        "mfu_full_attention": ledger.mfu_full_attention,
        "largest_loss": None if loss is None else loss._asdict(),
        "incidents": [incident._asdict() for incident in ledger.incidents],
        "exact": exact,
        "attempts": attempts,
    }
