"""The cluster service as the pages ask for it: queried here, so that no browser ever has the service's token."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.cluster.engines.submissions import last_submission
from headway.cluster.service.connection import ServiceConnection, job_path
from headway.dashboard.cluster_record import ClusterRecord, JobSpans
from headway.errors import Forbidden, HeadwayError

LINES = 10_000
"""Of the record, in one request."""
KEPT_EVENTS = 2000
MOST_EVENTS = 300
"""Of one page."""
NEWEST = 20
MOST_OVER = 100
MOST_LANES = 200
"""Jobs of the timeline."""
MOST_SPANS = 200
MOST_NODES = 64


class ClusterSource:
    """A service, and what its record says; `connect` opens a connection to it."""

    def __init__(self, connect: Callable[[], ServiceConnection], runs: Path) -> None:
        self._connect, self._runs = connect, runs
        self._reading = threading.Lock()
        self._forget(None)

    def _forget(self, first: Mapping[str, Any] | None) -> None:
        self._record, self._events, self._seen = ClusterRecord(), deque[dict[str, Any]](maxlen=KEPT_EVENTS), 0
        self._first, self._refusal = first, ""

    def overview(self) -> dict[str, Any]:
        """Return nodes, jobs and tenants as they are now."""
        service = self._connect()
        queries = {"nodes": "/api/v1/nodes", "jobs": "/api/v1/jobs", "tenants": "/api/v1/tenants"}
        document: dict[str, Any] = {key: service.get(path) for key, path in queries.items()}
        over = service.get("/api/v1/jobs", over="true")[:MOST_OVER]
        with self._reading:
            self._follow(service)
            newest = [self._events[-1 - index] for index in range(min(NEWEST, len(self._events)))]
        return document | {"service": service.url, "over": over, "newest": newest}

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
            self._follow(service)
            spans = self._record.jobs.get(row["id"])
            events = [event for event in reversed(self._events) if event["job"] == row["id"]]
            now_s = self._record.now_s
        return {
            "job": row,
            "tasks": [task["id"] for task in rows] if len(rows) > 1 else [],
            "spans": [] if spans is None else _spans(spans),
            "events": events[:MOST_EVENTS],
            "now_s": now_s,
            "run": self._run_of(row),
        }

    def timeline(self) -> dict[str, Any]:
        """Return the spans of the newest jobs, and what was decided."""
        service = self._connect()
        with self._reading:
            self._follow(service)
            events = list(self._events)
            now_s, hidden = self._record.now_s, max(0, len(self._record.jobs) - MOST_LANES)
            newest = sorted(self._record.jobs.values(), key=lambda job: job.last.end_s or now_s)[-MOST_LANES:]
            lanes = [
                {"job": job.job, "tenant": job.tenant, "gpus": job.gpus, "spans": _spans(job)}
                for job in sorted(newest, key=lambda job: job.spans[0].begin_s)
            ]
        rows = {row["id"]: row for over in ("false", "true") for row in service.get("/api/v1/jobs", over=over)}
        for lane in lanes:
            row = rows.get(lane["job"], {})
            lane |= {"name": row.get("name"), "tenant": lane["tenant"] or row.get("tenant")}
        return {
            "now_s": now_s,
            "jobs": lanes,
            "hidden": hidden,
            "events": events[: -1 - MOST_EVENTS : -1],
            "tenants": [tenant["name"] for tenant in service.get("/api/v1/tenants")],
            "refusal": self._refusal,
        }

    def _follow(self, service: ServiceConnection) -> None:
        """Read what the record has grown by; all of it, if it is another one. Spans are for those who may read it."""
        try:
            first = service.get("/api/v1/record", after=0, limit=1)[:1]
            if first and first[0] != self._first:  # another record, or its oldest lines are gone
                self._forget(first[0])
        except Forbidden as error:  # pages of who is no admin have events only
            self._refusal = error.message
        more = True
        while more:
            lines = [] if self._refusal else service.get("/api/v1/record", after=self._seen, limit=LINES)
            if not lines and not self._refusal:
                return
            answer = service.get("/api/v1/events", after=self._seen, limit=len(lines) or LINES)
            for line in lines:
                self._record.apply(line)
            self._events.extend(answer["events"])
            more, self._seen = answer["after"] > self._seen, answer["after"]

    def _run_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the run that a job trains: the one in this folder of runs that was submitted as this job."""
        folder = Path(str(row.get("folder", "")))
        run = next((each for each in (folder, *folder.parents) if each.parent == self._runs.absolute()), None)
        return run.name if run is not None and service_job_of(run) == row["id"] else None


def service_job_of(run: Path) -> str | None:
    """Return the id of the job of the service that trains a run."""
    try:
        submitted = last_submission(run)
    except (HeadwayError, OSError):
        return None
    return submitted.job if submitted is not None and submitted.engine == "service" else None


def _spans(job: JobSpans) -> list[dict[str, Any]]:
    return [
        {
            "state": span.state,
            "begin_s": span.begin_s,
            "end_s": span.end_s,
            "gpus": span.gpus,
            "nodes": span.nodes[:MOST_NODES],
        }
        for span in job.spans[-MOST_SPANS:]
    ]
