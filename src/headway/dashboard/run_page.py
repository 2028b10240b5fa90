"""What the page of a run shows beside its plots: plan and ledger, incidents, recipe, environment, logs, stacks."""

import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.dashboard.cached import files_signature, signature_of, urgent_signature
from headway.dashboard.cluster_source import service_job_of
from headway.dashboard.recorded import RecordedRuns, read_json, unreadable_lines
from headway.errors import HeadwayError, RunError
from headway.recipe.load import leaves
from headway.track import (
    OF_POLICIES,
    Ledger,
    Record,
    RunFolder,
    largest_overhead,
    latest_evaluations,
    lock_holder,
    read_plan,
)
from headway.track.insights import find_insights
from headway.track.lineage import read_record
from headway.track.plan_check import PlanCheck, check_plan, planned_shares

LOG_BYTES = 256 << 10
"""Of a log's end that is sent at once."""
_LOG = re.compile(r"[A-Za-z0-9._-]+\.log")
_STACK = re.compile(r"[A-Za-z0-9._-]+\.txt")
_ELSEWHERE = ("divergence", "below plan")
"""Kinds of insights that the page tells as a warning, and beside the plan."""
_MARKS = 400
"""Places of the clock that are sent, to draw incidents and an axis of hours."""


def overview(recorded: RecordedRuns, run: RunFolder, name: str) -> dict[str, Any]:
    """Return what the top of the page shows, and what else there is."""
    recipe = read_json(run.recipe_file)
    rollouts = run.path / "rollouts"
    evaluations = [evaluation.model_dump() for evaluation in latest_evaluations(run)]
    return recorded.row(name) | {
        "metrics": recorded.metric_names(run),
        "parent": parent_of(run, recipe, recorded),
        "environment": read_json(run.environment_file),
        "job": service_job_of(run.path),
        "policy": isinstance(recipe.get("rl"), dict) or rollouts.is_dir(),
        "evaluations": [{**entry, "settings": None} for entry in evaluations],
        "commands": {verb: run.command(verb) for verb in ("report", "logs", "resume", "stacks", "sample")},
    }


def parent_of(run: RunFolder, recipe: Mapping[str, Any], recorded: RecordedRuns) -> dict[str, Any] | None:
    """Return the run and the step that a run was started from; None for a run from scratch."""
    model, origin = recipe.get("model"), read_record(run.path).get("from")
    init = model.get("init") if isinstance(model, dict) else None
    if isinstance(origin, dict) and origin.get("address"):  # `train --from`: its recipe may name no weights
        init = origin["address"]
    if not isinstance(init, str) or Path(init).parent.name != "checkpoints":
        return None
    step = re.fullmatch(r"step-0*(\d+)", Path(init).name)
    folder = Path(init).parent.parent
    return {
        "run": folder.name,
        "step": int(step[1]) if step else None,
        "here": (recorded.root / folder.name / "events").is_dir(),
    }


# -- plan and ledger


def ledger_document(recorded: RecordedRuns, run: RunFolder) -> dict[str, Any]:
    """Return where a run's device-seconds went, beside the plan, and what happened to it when."""
    now, urgent = signature_of(run), urgent_signature(run)
    return recorded.cache.get_paced((run.path, "ledger"), now, urgent, lambda: _ledger(recorded, run))


def _ledger(recorded: RecordedRuns, run: RunFolder) -> dict[str, Any]:
    ledger, records = recorded.ledger(run)
    plan = read_plan(run)
    check = check_plan(plan, records)
    # The speed of a CPU is assumed: nothing to compare a measurement with.
    shares = {} if plan is None or plan.assumed else planned_shares(check, ledger)
    overhead = largest_overhead(ledger)
    clocks = clocks_of(records)
    insights = find_insights(records, plan, recorded.previous(run))
    warnings = [*(insight.text for insight in insights if insight.kind == "divergence"), *unreadable_lines(records)]
    if ledger.peak_too_low:
        warnings.append("MFU is not measured: steps were faster than the peak, measured on a busy machine")
    return {
        "total_s": ledger.total_ns / 1e9,
        "accounts": _accounts(ledger, shares),
        "useful_s": None if ledger.useful_ns is None or ledger.peak_too_low else ledger.useful_ns / 1e9,
        "mfu": ledger.mfu,
        "mfu_full_attention": ledger.mfu_full_attention,
        "overhead": None if overhead is None else overhead._asdict() | {"share": ledger.share(overhead.account)},
        "plan": None if check is None else _plan(check, ledger),
        "attempts": [
            {
                "number": attempt.number,
                "started": attempt.wall,
                "seconds": attempt.length_ns / 1e9,
                "workers": len(attempt.workers),
                "device": attempt.device,
                "resumed_from": attempt.resumed_from,
                "outcome": attempt.outcome,
                "reason": attempt.reason,
            }
            for attempt in ledger.attempts
        ],
        "incidents": [
            incident._asdict() | {"step": step_at(clocks.get(incident.attempt, []), incident.wall)}
            for incident in ledger.incidents
        ],
        "clock": _thinned(clocks),
        "insights": [asdict(insight) for insight in insights if insight.kind not in _ELSEWHERE],
        "warnings": warnings,
    }


def _accounts(ledger: Ledger, shares: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the accounts that took any time or were planned, in display order."""
    return [
        {"name": name, "seconds": ns / 1e9, "share": ledger.share(name), "plan": shares.get(name)}
        for name, ns in ledger.accounts.items()
        if ns or shares.get(name) or (name not in OF_POLICIES and name in ("compute", "unattributed"))
    ]


def _plan(check: PlanCheck, ledger: Ledger) -> dict[str, Any]:
    plan = check.plan
    return {
        "cluster": plan.cluster,
        "assumed": plan.assumed,
        "mesh": {axis: size for axis, size in plan.mesh.items() if size > 1},
        "microbatch": plan.microbatch,
        "recompute": plan.recompute,
        "step_s": plan.step_s,
        "measured_s": check.measured_s,
        "off": check.off,
        "mfu": plan.mfu,
        "measured_mfu": ledger.mfu,
        "tokens_per_s": plan.tokens_s,
        "accounts_s": dict(plan.accounts_s),
        "memory_bytes": plan.total_bytes,
        "capacity_bytes": plan.capacity_bytes,
    }


Clock = list[tuple[float, int]]
"""(Unix seconds, step) of what an attempt resumed from and of the steps that it ended, in order of time."""


def clocks_of(records: Sequence[Record]) -> dict[int, Clock]:
    """Return when each attempt ended which step."""
    clocks: dict[int, Clock] = {}
    for record in records:
        if record.header.rank == 0:
            events = [event for event in record.events if event["kind"] in ("resumed", "step")]
            pairs = [(event.get("t"), event.get("step")) for event in events]
            clock = [(record.header.wall + t / 1e9, n) for t, n in pairs if type(t) is int and type(n) is int]
            clocks[record.header.attempt] = sorted(clock)
    return clocks


def step_at(clock: Clock, wall: float) -> int | None:
    """Return the last step that had ended at a time; None before the first."""
    place = bisect_right(clock, (wall + 1e-6, math.inf))
    return clock[place - 1][1] or None if place else None


def _thinned(clocks: Mapping[int, Clock]) -> dict[str, list[float]]:
    """Return when steps ended, in the last attempt that did them: of some steps, evenly spread."""
    ends = {step: wall for attempt in sorted(clocks) for wall, step in clocks[attempt] if step}
    steps = sorted(ends)
    most = max(min(len(steps), _MARKS) - 1, 1)
    kept = sorted({index * (len(steps) - 1) // most for index in range(min(len(steps), _MARKS))})
    return {"steps": [steps[index] for index in kept], "walls": [round(ends[steps[index]], 3) for index in kept]}


# -- recipe


def recipe_document(recorded: RecordedRuns, run: RunFolder) -> dict[str, Any]:
    """Return a run's settings, with those that its parent had otherwise."""
    recipe = read_json(run.recipe_file)
    if not recipe:
        return {"parent": None, "rows": [], "problem": "recipe.json is missing or damaged"}
    values = dict(leaves(recipe))
    parent = parent_of(run, recipe, recorded)
    before: dict[str, Any] = {}
    if parent is not None and parent["here"]:
        before = dict(leaves(read_json(RunFolder(recorded.root / parent["run"]).recipe_file)))
    keys = list(dict.fromkeys([*values, *before]))
    rows = [
        {"key": key, "value": values.get(key)}
        | ({"before": before.get(key), "changed": values.get(key) != before.get(key)} if before else {})
        for key in keys
    ]
    return {"parent": parent, "rows": rows, "problem": None}


# -- logs and stacks


def log_files(run: RunFolder) -> list[dict[str, Any]]:
    """Return the logs of a run, newest first."""
    return _listed(run.logs, _LOG)


def stack_files(run: RunFolder) -> dict[str, Any]:
    """Return the stack dumps of a run, newest first, and whether more can be taken."""
    return {"files": _listed(run.stacks, _STACK), "running": lock_holder(run) is not None}


def read_log(run: RunFolder, file: str, offset: int | None = None) -> dict[str, Any]:
    """Return the end of a log, or what was written after an offset."""
    return _read_text(run, run.logs, _LOG, file, offset)


def read_stack(run: RunFolder, file: str) -> dict[str, Any]:
    """Return a stack dump."""
    return _read_text(run, run.stacks, _STACK, file, None)


def _listed(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    entries = sorted(files_signature(folder), key=lambda entry: entry[1], reverse=True)
    return [
        {"name": name, "modified": mtime / 1e9, "bytes": size}
        for name, mtime, size in entries
        if pattern.fullmatch(name)
    ]


def _read_text(run: RunFolder, folder: Path, pattern: re.Pattern[str], name: str, offset: int | None) -> dict[str, Any]:
    """Read a file of a folder by a name that is listed there."""
    if not pattern.fullmatch(name) or name not in {entry["name"] for entry in _listed(folder, pattern)}:
        raise RunError(f"run {run.name} has no file {name!r}", usage=True)
    path = folder / name
    check_inside(path, run)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - LOG_BYTES) if offset is None or offset > size else max(offset, size - LOG_BYTES)
        file.seek(begin)
        data = file.read(LOG_BYTES)
    return {"text": data.decode(errors="replace"), "from": begin, "end": begin + len(data), "bytes": size}


def check_inside(path: Path, run: RunFolder) -> None:
    """Refuse a file that a link leads out of the run's folder."""
    if not path.resolve().is_relative_to(run.path.resolve()):
        raise HeadwayError(f"{path.name} is outside of the run's folder")
