"""What the service measures, for Prometheus. Gauges are read from the database when they are asked for."""

import json
from collections import Counter as Count

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import Connection, func, select

from headway.cluster.service.tables import JOB_IS_ALIVE, JOB_WAITS, jobs, nodes, ranks

CYCLE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ServiceMetrics:
    """Metrics of one service, from its start."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"headway_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headway_{name}", text, labels, registry=registry)

        self._nodes = gauge("nodes", "Nodes by state", "state")
        self._gpus = gauge("gpus", "GPUs of nodes that take jobs", "chip")
        self._held = gauge("gpus_allocated", "GPUs that jobs hold, those that end too", "chip")
        self._jobs = gauge("jobs", "Jobs that are not over", "tenant", "state")
        self._wanted = gauge("gpus_wanted", "GPUs that waiting jobs ask for", "tenant")
        self._oldest = gauge("oldest_wait_seconds", "Since the submission of the oldest waiting job", "tenant")
        self._lines = gauge("record_lines", "Lines of the record")
        self._unfolded = gauge("record_unfolded_lines", "Lines that a start would read")
        self.cycle_s = Histogram("headway_cycle_seconds", "Scheduling cycles", buckets=CYCLE_S, registry=registry)
        """Durations of cycles."""
        self.started = counter("job_starts", "Starts of jobs that were decided")
        self.stopped = counter("job_preemptions", "Jobs that were told to stop for others, or moved")
        self.failures = counter("cycle_failures", "Cycles that the database or the scheduler failed")
        self.webhooks = counter("webhook_events", "Events for webhooks by what became of them", "outcome")

    def text(self, connection: Connection, now: float, lines: int, unfolded: int) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for gauge in (self._nodes, self._gpus, self._held, self._jobs, self._wanted, self._oldest):
            gauge.clear()
        self._lines.set(lines)
        self._unfolded.set(unfolded)
        self._read_nodes(connection)
        self._read_jobs(connection, now)
        return generate_latest(self._registry)

    def _read_nodes(self, connection: Connection) -> None:
        chips, gpus, states = dict[str, str](), Count[str](), Count[str]()
        for row in connection.execute(select(nodes)):
            spec = json.loads(row.spec)
            chips[row.name] = spec["chip"]
            states[row.state] += 1
            gpus[spec["chip"]] += len(spec["gpus"]) if row.state == "healthy" else 0
        held = Count[str]()
        for row in connection.execute(
            select(ranks.c.node, ranks.c.gpus).where(ranks.c.state.in_(("issued", "running")))
        ):
            held[chips.get(row.node, "?")] += len(json.loads(row.gpus))
        for state, count in states.items():
            self._nodes.labels(state).set(count)
        for chip, count in gpus.items():
            self._gpus.labels(chip).set(count)
            self._held.labels(chip).set(held[chip])

    def _read_jobs(self, connection: Connection, now: float) -> None:
        counts = select(jobs.c.tenant, jobs.c.state, func.count().label("number")).where(JOB_IS_ALIVE)
        for row in connection.execute(counts.group_by(jobs.c.tenant, jobs.c.state)):
            self._jobs.labels(row.tenant, row.state).set(row.number)
        wanted, oldest = Count[str](), dict[str, float]()
        waiting = select(jobs.c.tenant, jobs.c.demand, jobs.c.submitted).where(JOB_IS_ALIVE & JOB_WAITS)
        for row in connection.execute(waiting):
            wanted[row.tenant] += json.loads(row.demand)["gpus"]
            oldest[row.tenant] = min(oldest.get(row.tenant, now), row.submitted)
        for tenant, gpus in wanted.items():
            self._wanted.labels(tenant).set(gpus)
            self._oldest.labels(tenant).set(now - oldest[tenant])
