"""The control plane: what users and nodes ask of it, each in one transaction. Clock and database are arguments.

A job waits, then `starting` (GPUs recorded, nodes asked to start it), `running`, `ending` (told to stop), and then is
over or waits again. Every change that the scheduler must know adds a line to the record in the same transaction.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_bytes
from typing import Any

from sqlalchemy import Row, func, or_, select, update

from headway.cluster.engines.engine import CANCELLED, OVER, LaunchRequest, cannot_signal
from headway.cluster.scheduler.nodes import DRAIN_LEAD_S
from headway.cluster.service.audit import describe
from headway.cluster.service.cluster_values import record_cluster, record_specs
from headway.cluster.service.demand import EmptyCluster, job_of, tenant_of
from headway.cluster.service.exits import finish_if_exited
from headway.cluster.service.fleet import GIVE_UP_AFTER_S, Fleet
from headway.cluster.service.granted_starts import grant_starts
from headway.cluster.service.grants import LiveDecision
from headway.cluster.service.group_commit import GroupCommit
from headway.cluster.service.job_sizes import may_grow
from headway.cluster.service.job_streams import JobStreams
from headway.cluster.service.live_state import decided_line
from headway.cluster.service.messages import NodeOrders, NodeReport
from headway.cluster.service.new_jobs import NewJob, queue_jobs
from headway.cluster.service.node_changes import NodeChanges
from headway.cluster.service.node_reports import NodeReports
from headway.cluster.service.offers import find_offers, record_offers
from headway.cluster.service.record_lines import RecordLines
from headway.cluster.service.renewals import NodeCertificates
from headway.cluster.service.roles import lineage_of
from headway.cluster.service.secret_store import KEY_BYTES, SecretStore, drop_job_secrets, missing_secrets
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import (
    JOB_IS_OFFERED,
    RANK_IS_ALIVE,
    RANK_IS_GRANTED,
    jobs,
    node_conditions,
    nodes,
    ranks,
)
from headway.cluster.service.visibility import own_reason
from headway.errors import EngineError, UsageError

ALIVE = ("starting", "running", "ending")
_LAST_JOB = select(func.max(jobs.c.number))


class ControlPlane:
    """The state of a cluster in its database, and everything that changes it."""

    def __init__(
        self,
        store: ServiceStore,
        clock: Callable[[], float] = time.time,
        speed: float = 1.0,
        secrets: SecretStore | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        give_up_after_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """`clock` returns Unix seconds, `monotonic` seconds that never jump, by which nodes are silent; the scheduler's
        time passes `speed` times as fast, for emulated clusters. Without `secrets` those of jobs can be read by this
        plane only."""
        self._store, self._clock, self._speed = store, clock, speed
        self._group = GroupCommit(store)
        self._began = clock()
        self._offset = store.lines.last_at
        self._cluster: EmptyCluster | None = None
        self.secrets = secrets or SecretStore(token_bytes(KEY_BYTES))
        self.fleet = Fleet(store, self, speed=speed, give_up_after_s=give_up_after_s, monotonic=monotonic)
        """The nodes, for operators."""
        self.node_changes, self.changed = NodeChanges(), threading.Event()
        """Changes that nodes should look at, and whether the scheduler should."""
        self.streams = JobStreams(monotonic, lambda node: self.node_changes.note((node,)))
        """Connections of users to ports of jobs."""
        self.certificates = NodeCertificates(store)
        """Of nodes that have joined."""
        self.reports = NodeReports(store, self, self.fleet, self.node_changes, self.secrets, self.streams, speed)
        """What nodes say."""

    @property
    def now_s(self) -> float:
        """The scheduler's time: it never goes back, and stands still while no service runs."""
        return max(self._offset + (self._clock() - self._began) * self._speed, self._store.lines.last_at)

    @property
    def wall_s(self) -> float:
        """Unix seconds."""
        return self._clock()

    @property
    def speed(self) -> float:
        """How many times as fast as those the scheduler's seconds pass."""
        return self._speed

    def nodes_changed(self, names: Iterable[str] | None = None) -> None:
        """Have the scheduler look again, and those of these nodes (None: all) for which something has changed."""
        self.node_changes.note(names)
        self.changed.set()

    @property
    def lines(self) -> RecordLines:
        """The record so far."""
        return self._store.lines

    @property
    def cluster(self) -> "EmptyCluster":
        """Nodes, tenants and policy."""
        if self._cluster is None:
            raise EngineError("the cluster has no nodes yet", hint="wait until the first one has joined")
        return self._cluster

    # -- the cluster

    def set_cluster(
        self, specs: Sequence[Mapping[str, Any]], tenants: Sequence[Mapping[str, Any]], policy: str
    ) -> list[str]:
        """Record nodes and tenants if they have changed; nodes that are not named any more stay, without new jobs.

        A node on which jobs are stays as it was recorded until a service starts when there are none: such nodes are
        returned."""
        with self._store.write() as transaction:
            specified, unchanged = record_specs(transaction, specs)
            values = {"nodes": specified, "tenants": [dict(tenant) for tenant in tenants], "policy": policy}
            if self._cluster is None:
                transaction.add_lines([{"at": self.now_s, "calendar": self._clock()}])
            whole = len(specified) == len({spec["name"] for spec in specs})
            cluster = self._record_cluster(transaction, values, whole=whole)
        self._cluster = cluster
        with self._store.read() as connection:
            elsewhere = select(node_conditions.c.name).where(node_conditions.c.fingerprint.is_not(None))
            self.fleet.silence.hear(*(spec["name"] for spec in specs), *connection.execute(elsewhere).scalars())
        self.nodes_changed()
        return unchanged

    def record_nodes(self, transaction: Transaction) -> None:
        """Record that nodes have joined or are gone."""
        specs = transaction.execute(select(nodes.c.spec).order_by(nodes.c.name)).scalars()
        values = self.cluster.values | {"nodes": [json.loads(spec) for spec in specs]}
        self._cluster = self._record_cluster(transaction, values, whole=False)

    def node_joined(self, name: str) -> None:
        """Expect reports of a node."""
        self.fleet.silence.hear(name)
        self.nodes_changed()

    def change_tenants(self, change: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]]) -> None:
        """Replace the tenants by what `change` makes of them; their running jobs go on."""
        with self._store.write() as transaction:
            before = self.cluster.values
            cluster = self._record_cluster(transaction, before | {"tenants": list(change(before["tenants"]))})
        self._cluster = cluster
        self.nodes_changed()

    def _record_cluster(
        self, transaction: Transaction, values: Mapping[str, Any], *, whole: bool = True
    ) -> EmptyCluster:
        return record_cluster(transaction, values, self._store.lines.cluster, self.now_s, whole=whole)

    # -- what users ask

    def submit(self, request: LaunchRequest, secrets: Mapping[str, str] | None = None, key: str | None = None) -> str:
        """Queue a job, or the tasks of an array, and return its id; repeating a `key` returns the same id."""
        return self.submit_all([NewJob(request, secrets or {}, key)])[0]

    def submit_all(self, submissions: Sequence[NewJob]) -> list[str]:
        """Queue jobs, all or none, and return their ids in order."""
        now, tenants = self.now_s, self.cluster.tenants
        for new in submissions:
            self.cluster.check_job(job_of(new.request, new.request.name, now, tenants))

        def queue(transaction: Transaction) -> list[str]:
            number = (transaction.execute(_LAST_JOB).scalar() or 0) + 1
            queued = queue_jobs(transaction, submissions, number, self.now_s, self._clock(), tenants)
            for new, names in queued.added:
                tenant = tenant_of(new.request, tenants)
                self._keep_secrets(transaction, new.request, names, tenant, new.secrets)
            describe(f"jobs {', '.join(queued.ids)}")
            return queued.ids

        ids = self._group.run(queue)
        self.nodes_changed(())
        return ids

    def _keep_secrets(
        self,
        transaction: Transaction,
        request: LaunchRequest,
        names: Sequence[str],
        tenant: str,
        values: Mapping[str, str],
    ) -> None:
        """Keep the secrets that came with a submission; UsageError if one is missing."""
        if not request.secrets:
            return
        lineage = lineage_of(self.cluster.values["tenants"], tenant)
        missing = missing_secrets(transaction, lineage, request.secrets, values)
        if missing:
            raise UsageError(
                f"job {request.name} needs the secret {missing[0]}, which tenant {tenant} does not have",
                hint=f"headway secrets set {missing[0]}, or export {missing[0]} where you submit",
            )
        self.secrets.keep(
            transaction, names, tenant, {name: values[name] for name in request.secrets if name in values}
        )

    def cancel(self, name: str) -> None:
        """End a job or the tasks of an array: those that run are told to stop."""
        with self._store.write() as transaction:
            for row in self._rows(transaction, name):
                if row.state in ("starting", "running"):
                    self._tell_to_stop(transaction, row, "cancel", record=True)
                elif row.state == "ending" and row.stop != "cancel":
                    transaction.execute(update(jobs).where(jobs.c.id == row.id).values(stop="cancel"))
                elif row.state == "waiting":
                    values = {"state": "cancelled", "reason": CANCELLED, "ended": self._clock()}
                    transaction.execute(update(jobs).where(jobs.c.id == row.id).values(values))
                    drop_job_secrets(transaction, row.id)
                    if row.offered:
                        transaction.add_lines([{"at": self.now_s, "exited": row.id}])
        self.nodes_changed(transaction.nodes)

    def hold(self, name: str, held: bool = True) -> bool:
        """Keep waiting jobs from starting, or release them; False if there is nothing to do."""
        done = False
        with self._store.write() as transaction:
            for row in self._rows(transaction, name):
                if row.held != held and row.state == "waiting":
                    done = True
                    transaction.execute(update(jobs).where(jobs.c.id == row.id).values(held=held))
                    if row.offered:
                        transaction.add_lines([{"at": self.now_s, "hold" if held else "unhold": row.id}])
        self.nodes_changed(())
        return done

    def set_priority(self, name: str, priority: int) -> bool:
        """Change the priority of jobs that are not over; False if there is nothing to do."""
        done = False
        with self._store.write() as transaction:
            for row in self._rows(transaction, name):
                demand = json.loads(row.demand)
                if row.state in OVER or demand.get("priority", 0) == priority:
                    continue
                done, text = True, json.dumps(demand | {"priority": priority})
                transaction.execute(update(jobs).where(jobs.c.id == row.id).values(demand=text))
                if row.offered:
                    transaction.add_lines([{"at": self.now_s, "priority": row.id, "to": priority}])
        self.nodes_changed(())
        return done

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the commands of running jobs, once each."""
        with self._store.write() as transaction:
            rows = self._rows(transaction, name)
            alive = [row for row in rows if row.state in ("running", "ending")]
            if not alive:
                raise cannot_signal(name, rows[0].state if rows else "unknown")
            for row in alive:
                where = (ranks.c.job == row.id) & (ranks.c.start == row.starts)
                for rank in transaction.execute(select(ranks).where(where)).all():
                    sent = json.dumps([*json.loads(rank.signals), int(signal.Signals(number))])
                    transaction.execute(update(ranks).where(where & (ranks.c.rank == rank.rank)).values(signals=sent))
        self.nodes_changed()

    def _rows(self, transaction: Transaction, name: str) -> list[Row[Any]]:
        """The job of an id, or the tasks of an array."""
        wanted = or_(jobs.c.id == name, jobs.c.array == name)
        return list(transaction.execute(select(jobs).where(wanted).order_by(jobs.c.number)).all())

    def _tell_to_stop(self, transaction: Transaction, row: Row[Any], why: str, *, record: bool) -> None:
        """Have a job stopped: what no node has been asked to start has exited already."""
        transaction.execute(update(jobs).where(jobs.c.id == row.id).values(state="ending", stop=why))
        if record:
            transaction.add_lines([{"at": self.now_s, "stopping": row.id}])
        mine = (ranks.c.job == row.id) & (ranks.c.start == row.starts)
        transaction.execute(update(ranks).where(mine & (ranks.c.state == "granted")).values(state="exited"))
        transaction.nodes.update(transaction.execute(select(ranks.c.node).where(mine)).scalars())
        self.finish_job(transaction, row.id)

    def stop_job(self, transaction: Transaction, row: Row[Any], why: str) -> None:
        """See JobControl."""
        self._tell_to_stop(transaction, row, why, record=True)

    def finish_job(self, transaction: Transaction, name: str) -> None:
        """See JobControl."""
        self.reports.progress.pop(name, None)
        finish_if_exited(transaction, name, self.now_s, self._clock())

    def sync(self, report: NodeReport, peer: str | None = None) -> NodeOrders:
        """Take a node's report, and return everything that is wanted of it: see NodeReports."""
        return self.reports.sync(report, peer)

    # -- steps of a cycle

    def take_events(self) -> None:
        """Offer new jobs to the scheduler, and note nodes that do not report any more."""
        self.fleet.look()
        with self._store.read() as connection:
            offers = find_offers(connection)
        if offers is None:
            return
        with self._store.write() as transaction:
            for name in record_offers(transaction, offers, self.now_s, self._clock()):
                drop_job_secrets(transaction, name)
        if offers.refused:
            self.nodes_changed(())  # others may wait for these

    def waits(self) -> bool:
        """Whether a job waits that the scheduler may start, has to leave its node, or could grow."""
        able = JOB_IS_OFFERED & ~jobs.c.held
        with self._store.read() as connection:
            waiting = connection.execute(select(jobs.c.id).where(able).limit(1)).first() is not None
            return waiting or self.fleet.leaves_soon(DRAIN_LEAD_S) or may_grow(connection)

    def record_decisions(self, decisions: Sequence[LiveDecision], seen: int, now_s: float) -> bool:
        """Record the decisions of a cycle with all that follows from them; False if they are outdated: the record has
        grown since the `seen` lines that they are based on."""
        acted = [decision for decision in decisions if decision.kind != "reserve"]
        with self._store.lock:
            if len(self._store.lines) != seen:
                return False
            if not acted:
                return True
            with self._store.write() as transaction:
                transaction.add_lines([decided_line(now_s, list(decisions))])
                for decision in acted:
                    if decision.kind != "start":
                        row = transaction.execute(select(jobs).where(jobs.c.id == decision.job)).one()
                        why = "drain" if decision.kind == "move" else "preempt"
                        self._tell_to_stop(transaction, row, why, record=False)
                        reason = own_reason(decision.reason).sentence
                        transaction.execute(update(jobs).where(jobs.c.id == decision.job).values(reason=reason))
                starts = [decision for decision in acted if decision.kind == "start"]
                grant_starts(transaction, starts, self._clock())
        self.nodes_changed(transaction.nodes)
        return True

    def apply(self) -> int:
        """Ask nodes to start what nothing stands in the way of any more, all ranks of a job or none; return how many
        jobs."""
        with self._store.read() as connection:
            granted = connection.execute(select(ranks).where(RANK_IS_GRANTED)).all()
            if not granted:
                return 0
            before = {job for row in granted for job, _ in json.loads(row.after)}
            running = select(ranks.c.job, ranks.c.start).where(RANK_IS_ALIVE & ranks.c.job.in_(before))
            alive = {(row.job, row.start) for row in connection.execute(running)}
        ready = {row.job for row in granted if not alive & {(job, start) for job, start in json.loads(row.after)}}
        if not ready:
            return 0
        with self._store.write() as transaction:
            mine = ranks.c.job.in_(ready) & RANK_IS_GRANTED
            transaction.execute(update(ranks).where(mine).values(state="issued"))
        self.nodes_changed({row.node for row in granted if row.job in ready})
        return len(ready)
