"""The cluster service as the pages ask for it: queried here, so that no browser ever has the service's token."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.cluster.engines.submissions import last_submission
from headway.cluster.service.connection import ServiceConnection, job_path
from headway.dashboard.cluster_record import ClusterRecord, Entry, JobSpans
from headway.errors import HeadwayError, RunError

LINES = 10_000
"""Of the record, in one request."""
MOST_OVER = 100
MOST_ROWS = 200
"""Jobs of the timeline."""
MOST_ENTRIES = 300


class ClusterSource:
    """A service, and what its record says; `connect` opens a connection to it."""

    def __init__(self, connect: Callable[[], ServiceConnection], runs: Path) -> None:
        self._connect, self._runs = connect, runs
        self._record, self._reading = ClusterRecord(), threading.Lock()
        self._first: Mapping[str, Any] | None = None

    def overview(self) -> dict[str, Any]:
        """Return nodes, jobs and tenants as they are now."""
        service = self._connect()
        nodes, jobs = service.get("/api/v1/nodes"), service.get("/api/v1/jobs")
        over = service.get("/api/v1/jobs", over="true")[:MOST_OVER]
        with self._reading:
            record = self._follow(service)
            tenants = _tenants(record, jobs)
            facts = {"now_s": record.now_s, "policy": record.policy, "seen": record.seen}
            newest = [_entry(entry) for entry in reversed(record.entries)][:20]
        return {
            "service": service.url,
            "nodes": nodes,
            "jobs": jobs,
            "over": over,
            "tenants": tenants,
            "newest": newest,
        } | facts

    def why(self, job: str) -> dict[str, Any]:
        """Return why a job is in its state, as `headway why` prints it."""
        row: dict[str, Any] = self._connect().get(job_path(job, "why"))
        return row

    def job(self, job: str) -> dict[str, Any]:
        """Return all that is known of a job: its row, its spans, what was decided on it, and its run."""
        service = self._connect()
        rows = service.get(job_path(job))
        row = rows[0]
        with self._reading:
            record = self._follow(service)
            spans = record.jobs.get(row["id"])
            entries = [_entry(entry) for entry in reversed(record.entries) if entry.job == row["id"]]
            now_s = record.now_s
        return {
            "job": row,
            "tasks": [task["id"] for task in rows] if len(rows) > 1 else [],
            "spans": [] if spans is None else _spans(spans),
            "entries": entries[:MOST_ENTRIES],
            "now_s": now_s,
            "run": self._run_of(row),
        }

    def timeline(self) -> dict[str, Any]:
        """Return the spans of the newest jobs, and what was decided."""
        service = self._connect()
        names = {row["id"]: row["name"] for over in ("false", "true") for row in service.get("/api/v1/jobs", over=over)}
        with self._reading:
            record = self._follow(service)
            shown = sorted(record.jobs.values(), key=lambda job: job.last.end_s or record.now_s)[-MOST_ROWS:]
            rows = [
                {
                    "job": job.job,
                    "name": names.get(job.job),
                    "tenant": job.tenant,
                    "gpus": job.gpus,
                    "spans": _spans(job),
                }
                for job in sorted(shown, key=lambda job: job.spans[0].begin_s)
            ]
            entries = [_entry(entry) | {"name": names.get(entry.job or "")} for entry in reversed(record.entries)]
            now_s, hidden = record.now_s, len(record.jobs) - len(shown)
            tenants = [tenant["name"] for tenant in record.tenants]
        return {"now_s": now_s, "jobs": rows, "hidden": hidden, "entries": entries[:MOST_ENTRIES], "tenants": tenants}

    def _follow(self, service: ServiceConnection) -> ClusterRecord:
        """Read what the record has grown by; from its beginning, if it is another one."""
        first = service.get("/api/v1/record", after=0, limit=1)
        if self._first is not None and first[:1] != [self._first]:
            self._record = ClusterRecord()
        self._first = first[0] if first else None
        while lines := service.get("/api/v1/record", after=self._record.seen, limit=LINES):
            for line in lines:
                self._record.apply(line)
            if len(lines) < LINES:
                break
        return self._record

    def _run_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the run that a job trains: the one in this folder of runs that was submitted as this job."""
        folder = Path(str(row.get("folder", "")))
        for run in (folder, *folder.parents):
            if run.parent == self._runs.absolute() and (run / "jobs.jsonl").exists():
                try:
                    submitted = last_submission(run)
                except RunError:
                    return None
                ours = submitted is not None and submitted.engine == "service" and submitted.job == row["id"]
                return run.name if ours else None
        return None


def service_job_of(run: Path) -> str | None:
    """Return the id of the job of the service that trains a run."""
    try:
        submitted = last_submission(run)
    except (HeadwayError, OSError):
        return None
    return submitted.job if submitted is not None and submitted.engine == "service" else None


def _tenants(record: ClusterRecord, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per tenant: what it may use, uses and waits for."""
    used = record.gpu_seconds()
    rows = []
    for tenant in record.tenants:
        own = [job for job in jobs if job["tenant"] == tenant["name"]]
        held = [job for job in own if job["state"] in ("running", "ending")]
        waiting = [job for job in own if job["state"] == "waiting"]
        rows.append(
            {
                "name": tenant["name"],
                "parent": tenant.get("parent"),
                "guarantee": tenant.get("guarantee", 0),
                "budget_gpu_h": tenant.get("budget_gpu_h"),
                "held": sum(len(place["gpus"]) for job in held for place in job["placement"]),
                "running": len(held),
                "waiting": len(waiting),
                "waiting_gpus": sum(job["gpus"] for job in waiting),
                "used_gpu_h": used.get(tenant["name"], 0.0) / 3600,
            }
        )
    return rows


def _spans(job: JobSpans) -> list[dict[str, Any]]:
    return [
        {"state": span.state, "begin_s": span.begin_s, "end_s": span.end_s, "gpus": span.gpus, "nodes": span.nodes[:64]}
        for span in job.spans[-200:]
    ]


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "at_s": entry.at_s,
        "kind": entry.kind,
        "job": entry.job,
        "tenant": entry.tenant,
        "text": entry.text,
    }
