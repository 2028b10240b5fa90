"""`headway report RUN`: shows where every device-second of a run went, and what to try."""

import textwrap
import time
from dataclasses import asdict
from typing import Any, NamedTuple

from pydantic_core import from_json

from headway.cli.eval_view import evaluation_table
from headway.cli.options import Json, Run, Runs
from headway.cli.run_sync import find_up_to_date
from headway.cli.text import columns, duration, print_json, short_seconds
from headway.errors import RunError
from headway.track import (
    OF_POLICIES,
    AttemptTime,
    Ledger,
    Record,
    RunFolder,
    RunSummary,
    account,
    checkpoint_digests,
    history,
    largest_overhead,
    latest_evaluations,
    read_plan,
    read_recipe,
    read_run,
    runs_root,
    summarize,
)
from headway.track.divergence import find_divergence
from headway.track.insights import Insight, find_insights
from headway.track.plan_check import PlanCheck, check_plan, planned_shares
from headway.track.store.previous import find_previous


def report(run: Run, runs: Runs = None, json: Json = False) -> None:
    """Show where every device-second of a run went.

    Each is in one account. Then come the largest overhead, incidents, and the run's chain and digest.
    """
    folder = find_up_to_date(runs_root(runs), run)
    records = read_run(folder)
    ledger, exact = account(records), _exact(records)
    plan = read_plan(folder)
    check, replicas = check_plan(plan, records), _replicas(folder, records)
    divergence = find_divergence((event["step"], event.get("loss")) for event in history(records))
    insights = _with_documents(folder, find_insights(records, plan, find_previous(folder)))
    if json:
        more: dict[str, Any] = {
            "plan": _plan_document(check, ledger),
            "replicas": None if replicas is None else replicas._asdict(),
        }
        more |= {"divergence": None if divergence is None else asdict(divergence)}
        more |= {"insights": [asdict(insight) for insight in insights]}
        evaluations = [evaluation.model_dump() for evaluation in latest_evaluations(folder)]
        document = _document(folder, summarize(folder), ledger, exact)
        print_json(document | more | {"evaluations": evaluations})
    else:
        if plan is not None and plan.assumed:
            check = None  # the CPU's speed is assumed: nothing to compare a measurement with
        peak = _facts(records).get("peak_source") or "the device's peak"
        warnings = [] if divergence is None else [f"warning: {divergence.text}"]
        below = [
            *warnings,
            *_insights(folder, insights),
            *_unreadable(records),
            *_corruption(replicas),
            *_evaluations(folder),
        ]
        print("\n".join(_text(folder, summarize(folder), ledger, check, exact, str(peak), below)))


def _text(
    folder: RunFolder,
    summary: RunSummary,
    ledger: Ledger,
    check: PlanCheck | None,
    exact: dict[str, Any],
    peak: str,
    below: list[str],
) -> list[str]:
    lines = [_title(summary, ledger), "", *_accounts(ledger, planned_shares(check, ledger)), ""]
    lines += [*_useful(ledger, peak), *_plan(check, ledger), *_overhead(ledger)]
    if ledger.incidents:
        lines.append("incidents:")
        lines += [f"  {_clock(incident.wall)}  {incident.text}" for incident in ledger.incidents]
    lines += below
    if exact["chain"]:
        lines.append(f"exact: chain {exact['chain']} at step {exact['step']}")
    if exact["digest"]:
        lines.append(f"       digest {exact['digest']} at step {exact['digest_step']}")
    if len(ledger.attempts) > 1:
        lines += ["attempts:", *(_attempt(attempt) for attempt in ledger.attempts)]
    wrapped = [part for line in lines for part in _wrap(line)]
    key = "loss" if summary.reward is None else "reward"
    follow_up = folder.command("metrics", f"--key {key}") if summary.step else folder.command("logs")
    return [*wrapped, f"next: {follow_up}"]


def _with_documents(run: RunFolder, insights: list[Insight]) -> list[Insight]:
    """Return insights with the documents behind loss spikes."""
    if not any(insight.kind == "loss spike" for insight in insights):
        return insights
    from headway.data.spike_documents import name_documents  # NumPy takes 0.1 s, and most runs have no spikes

    try:
        recipe = read_recipe(run)
    except RunError:  # the report shows what can be read
        return insights
    return name_documents(insights, recipe)


def _insights(run: RunFolder, insights: list[Insight]) -> list[str]:
    """Return a line per thing that stands out, besides what the report has elsewhere."""
    shown = [insight for insight in insights if insight.kind not in ("divergence", "below plan")]
    lines = [f"  {insight.text}" for insight in shown]
    spike = next((insight.step for insight in shown if insight.kind == "loss spike" and insight.step), None)
    if spike is not None:
        lines.append(f"  all documents of that batch: {run.command('explain', str(spike))}")
    return ["insights:", *lines] if lines else []


def _unreadable(records: list[Record]) -> list[str]:
    """Return a line per record with unreadable lines."""
    return [
        f"record: {record.skipped} unreadable line{'s' * (record.skipped != 1)} in attempt {record.header.attempt}'s "
        f"{record.header.process}; figures use the readable lines"
        for record in records
        if record.skipped
    ]


def _evaluations(folder: RunFolder) -> list[str]:
    """Return a table of each task at the last step that was evaluated; `headway metrics` has all steps."""
    last = {evaluation.key: evaluation for evaluation in latest_evaluations(folder)}
    return ["evaluations:", *evaluation_table(list(last.values()), steps=True)] if last else []


class _Replicas(NamedTuple):
    """How often a run compared its replicas."""

    copies: int
    """Replicas on the last mesh."""
    compared: int
    last_step: int | None
    """The last step at which they were compared and equal."""


def _replicas(folder: RunFolder, records: list[Record]) -> _Replicas | None:
    """Return the comparisons of a run's replicas; None if it never had a mesh."""
    try:
        copies = int(from_json(folder.environment_file.read_bytes())["mesh"].get("replicate", 1))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    leaders = [record for record in records if record.header.rank == 0]
    steps = [event.get("step") for record in leaders for event in record.events if event["kind"] == "replicas"]
    return _Replicas(copies, len(steps), steps[-1] if steps else None)


def _corruption(replicas: _Replicas | None) -> list[str]:
    """Return whether silent corruption would have been detected."""
    if replicas is None:
        return []
    if replicas.copies < 2:
        return ["silent corruption: not detectable on this mesh (no replicas to compare)"]
    if not replicas.compared:
        return ["silent corruption: replicas were never compared (health.compare_every_steps)"]
    times = f"{replicas.compared:,} time{'s' * (replicas.compared != 1)}"
    return [f"silent corruption: replicas compared {times}, last at step {replicas.last_step}"]


def _wrap(line: str) -> list[str]:
    """Wrap a line at the width of the terminal, at most 80 columns, with a hanging indent."""
    width = columns()
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, drop_whitespace=True) if len(line) > width else [line]


def _title(summary: RunSummary, ledger: Ledger) -> str:
    attempts = f"{summary.attempts} attempt{'s' * (summary.attempts != 1)}"
    workers = summary.workers or 0
    devices = f"{workers} worker{'s' * (workers != 1)} x {summary.device or '?'}"
    took = duration(sum(attempt.length_ns for attempt in ledger.attempts) / 1e9)
    return f"{summary.name}  {summary.state}, step {summary.step} in {attempts}, {devices}, {took}"


def _accounts(ledger: Ledger, predicted: dict[str, float]) -> list[str]:
    """Return one row per account, with the share that the plan predicts."""
    rows = [f"  {'account':18} {'device-seconds':>15} {'share':>9}{'plan' if predicted else '':>10}".rstrip()]
    for name in ledger.accounts:
        if name in OF_POLICIES and not ledger.accounts[name]:
            continue
        row = f"  {name:18} {ledger.seconds(name):15,.1f} {ledger.share(name):9.1%}"
        check = f"{predicted[name]:.1%}" if name in predicted else "-"
        rows.append(f"{row}{check:>10}" if predicted else row)
    return [*rows, f"  {'total':18} {ledger.total_ns / 1e9:15,.1f} {1 if ledger.total_ns else 0:9.1%}"]


def _useful(ledger: Ledger, peak: str) -> list[str]:
    """Return useful time and MFU by both conventions; nothing if the peak is unknown."""
    if ledger.peak_too_low:
        return [f"MFU: not measured: steps were faster than the peak, measured on a busy machine ({peak})"]
    if ledger.useful_ns is None or ledger.mfu is None:
        return []
    share = ledger.useful_ns / ledger.total_ns if ledger.total_ns else 0.0
    lines = [f"useful: {ledger.useful_ns / 1e9:,.1f} device-seconds at peak, {share:.1%} of all ({peak})"]
    counted = "without attention's own GEMMs"
    if ledger.mfu_full_attention == ledger.mfu:
        counted = "attention counted in full: it is not causal"
    elif ledger.mfu_full_attention is not None:
        counted = f"causal attention counted half; {ledger.mfu_full_attention:.1%} counting full attention"
    when = "during steps without generation" if ledger.accounts["generation"] else "during steps"
    return [*lines, f"MFU: {ledger.mfu:.1%} {when}, {counted}"]


def _plan(check: PlanCheck | None, ledger: Ledger) -> list[str]:
    """Return the planned and the measured step, and the accounts of the planned one."""
    if check is None:
        return []
    plan, line = check.plan, f"plan: {short_seconds(check.plan.step_s)} per step"
    if check.measured_s is not None:
        line += f", measured {short_seconds(check.measured_s)} ({100 * (check.off or 0):+.1f} %)"
    measured = "" if ledger.mfu is None else f", measured {ledger.mfu:.1%}"
    parts = [f"{name} {seconds / plan.step_s:.0%}" for name, seconds in plan.accounts_s.items()]
    shown = [part for part in parts if not part.endswith(" 0%")]
    return [f"{line}; MFU {plan.mfu:.1%}{measured}", f"  planned step: {', '.join(shown)}"]


def _plan_document(check: PlanCheck | None, ledger: Ledger) -> dict[str, Any] | None:
    """Return plan.json with what was measured over the steps it applies to."""
    if check is None:
        return None
    measured = {"steps": check.steps, "step_s": check.measured_s, "mfu": ledger.mfu}
    shares = planned_shares(check, ledger)
    return check.plan.model_dump() | {"measured": measured, "off": check.off, "shares": shares}


def _overhead(ledger: Ledger) -> list[str]:
    overhead = largest_overhead(ledger)
    if overhead is None:
        return []
    share = ledger.share(overhead.account)
    return [
        f"largest overhead: {overhead.account}, {overhead.seconds:,.1f} device-seconds, {share:.1%}.",
        f"  {overhead.advice}",
    ]


def _attempt(attempt: AttemptTime) -> str:
    resumed = "-" if attempt.resumed_from is None else f"after step {attempt.resumed_from}"
    first = f"  {attempt.number}  {_clock(attempt.wall)}  {duration(attempt.length_ns / 1e9)}"
    first += f"  {len(attempt.workers)} x {attempt.device or '?'}  {resumed:16}"
    return f"{first}  {attempt.outcome or 'no end recorded'}"


def _clock(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _facts(records: list[Record]) -> dict[str, Any]:
    events = [event for record in records if record.header.rank == 0 for event in record.events]
    return next((event for event in reversed(events) if event["kind"] == "facts"), {})


def _exact(records: list[Record]) -> dict[str, Any]:
    """Return the last link of the chain and the last checkpoint's digest."""
    steps, digests = history(records), checkpoint_digests(records)
    last, saved = steps[-1] if steps else {}, max(digests, default=None)
    digest = None if saved is None else digests[saved]
    return {"step": last.get("step"), "chain": last.get("chain"), "digest_step": saved, "digest": digest}


def _document(folder: RunFolder, summary: RunSummary, ledger: Ledger, exact: dict[str, Any]) -> dict[str, Any]:
    """Return everything the text shows as JSON-ready values."""
    overhead = largest_overhead(ledger)
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
        "largest_loss": None if overhead is None else overhead._asdict(),
        "incidents": [incident._asdict() for incident in ledger.incidents],
        "exact": exact,
        "attempts": attempts,
    }
