"""Jobs of the service in verbs: found by id or name, and printed."""

import time
from pathlib import Path
from typing import Any

from headway.cli.text import columns, duration, plural, print_json, shortened
from headway.cluster.engines.engine import OVER
from headway.cluster.service.connection import ADDRESS, connect, job_path, service_folder
from headway.cluster.service.login import login_file
from headway.errors import EngineError, EngineUnreachable, RunError, UsageError
from headway.track import command, find_run, list_runs


def has_service(root: Path) -> bool:
    """Return whether a service was ever started for a folder of runs, or the user has logged in to one."""
    return (service_folder(root) / ADDRESS).exists() or login_file().exists()


def service_job(root: Path, name: str) -> list[dict[str, Any]] | None:
    """Return the rows of a job of the service that is not a run; None if it may be a run, or there is no service.

    UsageError if it is neither.
    """
    if (root / name).exists() or not has_service(root):
        return None
    try:
        rows: list[dict[str, Any]] = connect(root).get(job_path(name))
    except UsageError:
        if any(run.name.startswith(name) for run in list_runs(root)):
            return None
        try:
            find_run(root, name)  # the last one, or one that was set aside
        except RunError:
            hint = f"{command(root, 'queue')} lists jobs, {command(root, 'runs')} runs"
            raise UsageError(f"no job of the service and no run is called '{name}'", hint=hint) from None
        return None
    except EngineUnreachable:  # whoever is logged in somewhere may mean a run of this folder
        if (service_folder(root) / ADDRESS).exists():
            raise
        return None
    return rows or None


def change_job(root: Path, name: str, verb: str, json: bool, body: dict[str, Any] | None = None) -> None:
    """Have the service change a job, and print what has become of it."""
    answer = connect(root).post(job_path(name, verb), body)
    states = sorted({row["state"] for row in answer["jobs"]})
    if not answer["changed"] and verb == "priority":
        if set(states) <= OVER:
            raise EngineError(f"cannot change the priority of job {name}: it is {', '.join(states)}")
    elif not answer["changed"]:
        held = "" if verb == "hold" else " and not held"
        raise EngineError(f"cannot {verb} job {name}: it is {', '.join(states)}{held}", hint="only waiting jobs can")
    if json:
        print_json(answer["jobs"])
        return
    for row in answer["jobs"]:
        priority = f", with priority {row['priority']}" if verb == "priority" else ""
        print(f"job {row['id']} ({row['name']}) is {state_of(row)}{priority}")


def state_of(row: dict[str, Any]) -> str:
    """Return the state of a job in a word."""
    return "held" if row["held"] and row["state"] == "waiting" else str(row["state"])


def gpus_of(row: dict[str, Any]) -> str:
    """Return the GPUs of a job: machines x GPUs; of an elastic job those that it has, and the sizes possible."""
    if row.get("sizes"):  # a service that is older does not tell them
        sizes = ",".join(map(str, row["sizes"]))
        has = sum(len(place["gpus"]) for place in row["placement"])
        return f"{has} of {sizes}" if row["state"] in ("starting", "running", "ending") else sizes
    return f"{row['machines']}x{row['gpus'] // row['machines']}" if row["machines"] > 1 else str(row["gpus"])


def job_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per job, and its reason under it."""
    words = [("job", "name", "tenant", "GPUs", "state", "since")]
    for row in rows:
        since = row["ended"] or row["started"] or row["submitted"]
        passed = duration(max(time.time() - since, 0))
        words.append((row["id"], row["name"], row["tenant"], gpus_of(row), state_of(row), passed))
    width = columns()
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    widths[1] = max(8, min(widths[1], width - sum(widths) + widths[1] - 10))
    lines = list[str]()
    for cells, reason in zip(words, ["", *(row["reason"] for row in rows)], strict=True):
        parts = [shortened(cell, length).ljust(length) for cell, length in zip(cells, widths, strict=True)]
        lines.append(shortened("  ".join(parts).rstrip(), width))
        lines += [shortened(f"  {reason}", width)] if reason else []
    return lines


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how many jobs there are of each state."""
    states = [state_of(row) for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    return f"{plural(len(rows), 'job')}: {counts}"
