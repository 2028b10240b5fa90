"""The service as an engine: `--engine service` submits to whatever `headway up` runs for the same folder of runs."""

import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from headway.cluster.engines.engine import (
    PROBE_S,
    Engine,
    JobStatus,
    LaunchRequest,
    Machine,
    State,
    array_status,
    check_limit,
)
from headway.cluster.engines.scripts import inherited_environment, list_logs, log_folder, task_script
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.connection import ServiceConnection, connect, job_path
from headway.errors import EngineError


class ServiceEngine(Engine):
    """Jobs of the service of a folder of runs."""

    name: ClassVar[str] = "service"

    def __init__(self, runs: Path, site: Mapping[str, str] | None = None) -> None:
        """`site` are settings for every job, such as a tenant."""
        self._runs, self._site = runs, dict(site or {})

    @property
    def connection(self) -> ServiceConnection:
        """A connection to the service, wherever it listens now."""
        return connect(self._runs)

    def probe(self) -> None:
        """See Engine."""
        connect(self._runs, PROBE_S).get("/health")

    def inventory(self) -> list[Machine]:
        """See Engine."""
        return [
            Machine(
                name=node["name"],
                state="away" if node["state"] != "healthy" else "busy" if _is_used(node) else "free",
                gpus=len(node["gpus"]),
                gpus_free=node["gpus_free"],
                cpus=node["cpus"],
                memory_bytes=node["memory_bytes"],
                groups=(node["chip"],),
                reason=node["reason"],
            )
            for node in self.connection.get("/api/v1/nodes")
        ]

    def describe(self, request: LaunchRequest) -> str:
        """See Engine: the script that would run."""
        request = self._complete(request)
        self.connection.post("/api/v1/jobs", {"request": request_to_json(request), "dry": True})
        return task_script(request)

    def launch(self, request: LaunchRequest) -> str:
        """See Engine. A submission that is repeated, since no answer came, is one submission. Secrets that are not in
        the environment are those of the tenant."""
        values = {name: os.environ[name] for name in request.secrets if name in os.environ}
        request = self._complete(request)
        site = dict(request.site)
        key = site.pop("key", None) or secrets.token_hex(16)
        body = {"request": request_to_json(replace(request, site=site)), "secrets": values, "key": key}
        return str(self.connection.post("/api/v1/jobs", body)["id"])

    def _complete(self, request: LaunchRequest) -> LaunchRequest:
        check_limit(request, request.limit_s)
        environment = {**inherited_environment(), **request.environment}
        return replace(request, environment=environment, site={**self._site, **request.site})

    def status(self, jobs: Sequence[str]) -> dict[str, JobStatus]:
        """See Engine."""
        if not jobs:
            return {}
        rows = self.connection.get("/api/v1/jobs", job=list(dict.fromkeys(jobs)))
        statuses = dict[str, JobStatus]()
        for job in jobs:
            tasks = [status_of(row) for row in rows if row["array"] == job]
            own = next((status_of(row) for row in rows if row["id"] == job), None)
            statuses[job] = own or (array_status(tasks) if tasks else JobStatus("unknown", "unknown job"))
        return statuses

    def signal(self, job: str, number: signal.Signals) -> None:
        """See Engine."""
        self.connection.post(job_path(job, "signal"), {"number": int(number)})

    def logs(self, job: str) -> list[Path]:
        """See Engine."""
        rows = self.connection.get("/api/v1/jobs", job=[job])
        return [path for row in rows for path in list_logs(log_folder(Path(row["folder"]), row["id"]))]

    def release(self, job: str) -> bool:
        """See Engine: the service holds back what a user has put on hold."""
        return bool(self.connection.post(job_path(job, "release"))["changed"])

    def cancel(self, job: str) -> None:
        """See Engine."""
        if self.connection.get("/api/v1/jobs", job=[job]):
            self.connection.post(job_path(job, "cancel"))


def _is_used(node: Mapping[str, Any]) -> bool:
    """Whether a job has something of a node; those of other tenants are not listed."""
    return bool(node["gpus_free"] < len(node["gpus"]) or node["cpus_free"] < node["cpus"])


_STATES: Mapping[str, State] = {"starting": "waiting"}


def status_of(row: Mapping[str, Any]) -> JobStatus:
    """The state of a job as all engines report it."""
    reason = f"held; {row['reason']}".rstrip("; ") if row["held"] else row["reason"]
    machines = tuple(place["node"] for place in row["placement"])
    remedy = "requeue" if row["held"] and row["state"] == "waiting" else ""
    state: State = _STATES.get(row["state"], row["state"])
    return JobStatus(state, reason, machines, row["exit_status"], row["starts"], row["state"], remedy)  # type: ignore[arg-type]


def sole_job(connection: ServiceConnection, name: str) -> list[dict[str, Any]]:
    """The rows of a job, or of an array's tasks, by id or name; EngineError if there is none."""
    rows: list[dict[str, Any]] = connection.get(job_path(name))
    if not rows:
        raise EngineError(f"no job '{name}'")
    return rows
