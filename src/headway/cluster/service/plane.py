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

from sqlalchemy import Row, bindparam, delete, func, insert, or_, select, update

from headway.cluster.engines.engine import CANCELLED, OVER, LaunchRequest, cannot_signal
from headway.cluster.scheduler.nodes import DRAIN_LEAD_S
from headway.cluster.service.audit import describe
from headway.cluster.service.demand import EmptyCluster, job_of, tenant_of
from headway.cluster.service.exits import finish_if_exited
from headway.cluster.service.fleet import GIVE_UP_AFTER_S, Fleet, is_elsewhere
from headway.cluster.service.granted_starts import grant_starts
from headway.cluster.service.grants import LiveDecision
from headway.cluster.service.live_state import decided_line
from headway.cluster.service.messages import NodeOrders, NodeReport, StartReport, WantedStart, start_key
from headway.cluster.service.new_jobs import NewJob, queue_jobs
from headway.cluster.service.node_changes import NodeChanges
from headway.cluster.service.node_state import node_state, unwanted_starts
from headway.cluster.service.offers import find_offers, record_offers
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.record_lines import RecordLines
from headway.cluster.service.run_progress import JobProgress
from headway.cluster.service.secret_store import KEY_BYTES, SecretStore, drop_job_secrets, missing_secrets
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import jobs, node_conditions, nodes, ranks, tenant_secrets
from headway.cluster.service.visibility import own_reason
from headway.errors import EngineError, UnknownNode, UsageError

ALIVE = ("starting", "running", "ending")
RESULT = RankResult.__dataclass_fields__

_KNOWN: Any = (
    select(nodes.c.name, nodes.c.state, *node_conditions.c["cordoned", "problems", "fingerprint"])
    .select_from(nodes.outerjoin(node_conditions, node_conditions.c.name == nodes.c.name))
    .where(nodes.c.name == bindparam("name"))
)
"""State and conditions of a node."""
_WANTED: Any = (
    select(*ranks.c, jobs.c.request, jobs.c.array, jobs.c.tenant, jobs.c.state.label("job_state"))
    .join(jobs, jobs.c.id == ranks.c.job)
    .where((ranks.c.node == bindparam("name")) & ranks.c.state.in_(("issued", "running")))
)
"""The starts that a node should know."""


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
        self._began = clock()
        self._offset = store.lines.last_at
        self._cluster: EmptyCluster | None = None
        self.secrets = secrets or SecretStore(token_bytes(KEY_BYTES))
        self.fleet = Fleet(store, self, speed=speed, give_up_after_s=give_up_after_s, monotonic=monotonic)
        """The nodes, for operators."""
        self.node_changes, self.changed = NodeChanges(), threading.Event()
        """Changes that nodes should look at, and whether the scheduler should."""
        self.progress: dict[str, JobProgress] = {}
        """Of running jobs that report it, since this service has started."""
        self._saves: dict[str, tuple[str, int | None]] = {}
        """Start and step of the newest recorded save of these."""
        self._last_syncs: dict[str, tuple[int, str | None, NodeReport, NodeOrders]] = {}
        """What each node last reported at which version, as whom, and its orders: repeating it needs no database."""

    @property
    def now_s(self) -> float:
        """The scheduler's time: it never goes back, and stands still while no service runs."""
        return max(self._offset + (self._clock() - self._began) * self._speed, self._store.lines.last_at)

    @property
    def wall_s(self) -> float:
        """Unix seconds."""
        return self._clock()

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
        unchanged = list[str]()
        with self._store.write() as transaction:
            known = {row.name: json.loads(row.spec) for row in transaction.execute(select(nodes))}
            for spec in specs:
                if is_elsewhere(transaction, spec["name"]):
                    raise UsageError(
                        f"node '{spec['name']}' has joined from elsewhere, and this machine has the same name",
                        hint="--no-local-node, or headway node remove it",
                    )
                if spec["name"] not in known:
                    values = {"name": spec["name"], "spec": json.dumps(spec), "state": "draining"}
                    transaction.execute(insert(nodes).values(values))
                elif spec != known[spec["name"]] and not self._change_node(transaction, spec):
                    unchanged.append(spec["name"])
                    continue
                known[spec["name"]] = dict(spec)
            values = {"nodes": list(known.values()), "tenants": [dict(tenant) for tenant in tenants], "policy": policy}
            if self._cluster is None:
                transaction.add_lines([{"at": self.now_s, "calendar": self._clock()}])
            cluster = self._record_cluster(transaction, values, whole=known.keys() == {spec["name"] for spec in specs})
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
        """Record nodes, tenants and policy if they have changed; UsageError if they do not fit together."""
        used = set(transaction.execute(select(jobs.c.tenant).where(jobs.c.state.not_in(OVER)).distinct()).scalars())
        gone = used - {tenant["name"] for tenant in values["tenants"]}
        if gone:
            raise UsageError(
                f"tenant {min(gone)} has jobs and is not listed any more", hint="list it until they are over"
            )
        cluster = EmptyCluster(values, whole=whole)
        transaction.execute(delete(tenant_secrets).where(tenant_secrets.c.tenant.not_in(cluster.tenants)))
        if cluster.values != self._store.lines.cluster:
            transaction.add_lines([{"at": self.now_s, "cluster": cluster.values}])
        return cluster

    @staticmethod
    def _change_node(transaction: Transaction, spec: Mapping[str, Any]) -> bool:
        """Record what a node has now; False if jobs are on it."""
        busy = (ranks.c.node == spec["name"]) & (ranks.c.state != "exited")
        if transaction.execute(select(func.count()).select_from(ranks).where(busy)).scalar_one():
            return False
        transaction.execute(update(nodes).where(nodes.c.name == spec["name"]).values(spec=json.dumps(spec)))
        return True

    # -- what users ask

    def submit(self, request: LaunchRequest, secrets: Mapping[str, str] | None = None, key: str | None = None) -> str:
        """Queue a job, or the tasks of an array, and return its id; repeating a `key` returns the same id."""
        return self.submit_all([NewJob(request, secrets or {}, key)])[0]

    def submit_all(self, submissions: Sequence[NewJob]) -> list[str]:
        """Queue jobs, all or none, and return their ids in order."""
        now, tenants = self.now_s, self.cluster.tenants
        for new in submissions:
            self.cluster.check_job(job_of(new.request, new.request.name, now, tenants))
        with self._store.write() as transaction:
            number = (transaction.execute(select(func.max(jobs.c.number))).scalar() or 0) + 1
            queued = queue_jobs(transaction, submissions, number, now, self._clock(), tenants)
            for new, names in queued.added:
                tenant = tenant_of(new.request, tenants)
                self._keep_secrets(transaction, new.request, names, tenant, new.secrets)
            describe(f"jobs {', '.join(queued.ids)}")
        self.nodes_changed(())
        return queued.ids

    def _keep_secrets(
        self,
        transaction: Transaction,
        request: LaunchRequest,
        names: Sequence[str],
        tenant: str,
        values: Mapping[str, str],
    ) -> None:
        """Keep the secrets that came with a submission; UsageError if one is missing."""
        missing = missing_secrets(transaction, tenant, request.secrets, values)
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
        self.progress.pop(name, None)
        finish_if_exited(transaction, name, self.now_s, self._clock())

    # -- what nodes report

    def sync(self, report: NodeReport, peer: str | None = None) -> NodeOrders:
        """Take a node's report, and return everything that is wanted of it. `peer` is the fingerprint of the
        certificate that was shown; this machine's own nodes have none."""
        version = self.node_changes.version(report.node)
        last_sync = self._last_syncs.get(report.node)
        if last_sync is not None and last_sync[:3] == (version, peer, report):
            self.fleet.silence.hear(report.node)
            return last_sync[3]
        with self._store.read() as connection:
            known = connection.execute(_KNOWN, {"name": report.node}).first()
            rows = _by_key(connection.execute(_WANTED, {"name": report.node}).all())
        if known is None:
            raise UnknownNode(f"unknown node '{report.node}': it was removed", hint="headway node join")
        if known.fingerprint != peer:
            raise UsageError(
                f"whoever reports for node '{report.node}' has another certificate than it",
                hint="a node reports for itself only; has it been replaced?",
            )
        self.fleet.silence.hear(report.node)
        problems = json.dumps(report.problems)
        saves = self._take_progress(report, rows)
        if (
            saves
            or _news(report, rows)
            or known.state != _state(report, rows, known)
            or (known.problems or "[]") != problems
        ):
            with self._store.write() as transaction:  # with what holds now: it may have been given up meanwhile
                known = transaction.execute(_KNOWN, {"name": report.node}).one()
                rows = _by_key(transaction.execute(_WANTED, {"name": report.node}).all())
                self.fleet.set_problems(transaction, report.node, problems)
                self.fleet.set_state(transaction, report.node, _state(report, rows, known))
                transaction.add_lines([line for line in saves if self._runs(transaction, line["saves"])])
                for start in _news(report, rows):
                    self._take_report(transaction, rows[start.key], start.state, start.result)
                rows = _by_key(transaction.execute(_WANTED, {"name": report.node}).all())
            self.nodes_changed({report.node, *transaction.nodes})
        if unwanted_starts(report, rows):  # they are killed first
            begun = {start.key for start in report.starts}
            rows = {key: row for key, row in rows.items() if key in begun}
        values = self._secret_values(list(rows.values()))
        starts = tuple(_wanted_start(row, values) for row in rows.values())
        orders = NodeOrders(self._store.epoch, self._store.cluster, starts, self.fleet.give_up_after_s)
        if not any(values.values()):
            self._last_syncs[report.node] = version, peer, report, orders
        return orders

    def check_code(self, digest: str, peer: str | None) -> None:
        """Raise UsageError unless a node has a job with this code; this machine's own nodes are trusted with all."""
        if peer is None:
            return
        mine = node_conditions.c.fingerprint == peer
        on = ranks.join(node_conditions, node_conditions.c.name == ranks.c.node).join(jobs, jobs.c.id == ranks.c.job)
        wanted = select(jobs.c.request).select_from(on).where(mine & (ranks.c.state != "exited"))
        with self._store.read() as connection:
            requests = connection.execute(wanted).scalars().all()
        if not any(json.loads(request)["site"].get("code") == digest for request in requests):
            raise UsageError(f"no job on this node has code {digest[:12]}")

    def _take_progress(self, report: NodeReport, rows: Mapping[str, Row[Any]]) -> list[dict[str, Any]]:
        """Remember the progress that a node reports; return the lines of new saves."""
        lines = []
        for start in report.starts:
            row = rows.get(start.key)
            if start.progress is None or row is None or row.job_state != "running":
                continue
            key, before = f"{row.job}:{row.start}", self.progress.get(row.job)
            if self._saves.get(row.job) != (key, start.progress.saved_step) or before is None:
                saved = start.progress.saved_unix_s
                age_s = None if saved is None else max(self._clock() - saved, 0.0) * self._speed
                lines.append({"at": self.now_s, "saves": row.job, "age_s": age_s})
                self._saves[row.job] = key, start.progress.saved_step
            self.progress[row.job] = start.progress
        return lines

    @staticmethod
    def _runs(transaction: Transaction, name: str) -> bool:
        running = (jobs.c.id == name) & (jobs.c.state == "running")
        return transaction.execute(select(jobs.c.id).where(running)).first() is not None

    def _secret_values(self, rows: Sequence[Row[Any]]) -> dict[str, dict[str, str] | None]:
        """The values of the jobs that a node is to start, by id; None if they cannot be read."""
        names = {row.job: json.loads(row.request)["secrets"] for row in rows if _is_fresh(row)}
        if not any(names.values()):
            return {}
        with self._store.read() as connection:
            return {
                row.job: self.secrets.values(connection, row.job, row.tenant, names[row.job])
                for row in rows
                if names.get(row.job)
            }

    def _take_report(self, transaction: Transaction, row: Row[Any], state: str, result: RankResult | None) -> None:
        mine = (ranks.c.job == row.job) & (ranks.c.start == row.start)
        text = None if result is None else json.dumps({key: getattr(result, key) for key in RESULT})
        values = {"state": state, "result": text}
        # only forward: another report may have said more meanwhile
        before = ("issued",) if state == "running" else ("issued", "running")
        changed = transaction.execute(
            update(ranks).where(mine & (ranks.c.rank == row.rank) & ranks.c.state.in_(before)).values(values)
        ).rowcount
        if not changed:
            return
        others = transaction.execute(select(ranks.c.state).where(mine)).scalars().all()
        if state == "running" and "issued" not in others:
            starting = (jobs.c.id == row.job) & (jobs.c.state == "starting")
            now = {"state": "running", "reason": "", "started": self._clock()}
            if transaction.execute(update(jobs).where(starting).values(now)).rowcount:
                transaction.add_lines([{"at": self.now_s, "running": row.job}])
        if state == "exited":
            if result is not None and (result.error or result.lost) and {*others} - {"exited"}:
                job = transaction.execute(select(jobs).where(jobs.c.id == row.job)).one()
                if job.state in ("starting", "running"):  # the others would wait for it for ever
                    self._tell_to_stop(transaction, job, "broken", record=True)
            self.finish_job(transaction, row.job)

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
        """Whether a job waits that the scheduler may start, or has to leave its node."""
        able = (jobs.c.state == "waiting") & jobs.c.offered & ~jobs.c.held
        with self._store.read() as connection:
            waiting = connection.execute(select(jobs.c.id).where(able).limit(1)).first() is not None
        return waiting or self.fleet.leaves_soon(DRAIN_LEAD_S)

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
            granted = connection.execute(select(ranks).where(ranks.c.state == "granted")).all()
            if not granted:
                return 0
            before = {job for row in granted for job, _ in json.loads(row.after)}
            running = select(ranks.c.job, ranks.c.start).where((ranks.c.state != "exited") & ranks.c.job.in_(before))
            alive = {(row.job, row.start) for row in connection.execute(running)}
        ready = {row.job for row in granted if not alive & {(job, start) for job, start in json.loads(row.after)}}
        if not ready:
            return 0
        with self._store.write() as transaction:
            mine = ranks.c.job.in_(ready) & (ranks.c.state == "granted")
            transaction.execute(update(ranks).where(mine).values(state="issued"))
        self.nodes_changed({row.node for row in granted if row.job in ready})
        return len(ready)


def _is_fresh(row: Row[Any]) -> bool:
    """Whether a node is still to begin a start."""
    return bool(row.state == "issued" and row.job_state != "ending")


def _wanted_start(row: Row[Any], secrets: Mapping[str, dict[str, str] | None]) -> WantedStart:
    return WantedStart(
        start_key(row.job, row.start, row.rank),
        "end" if row.job_state == "ending" else "run",
        tuple(json.loads(row.gpus)),
        row.rank,
        tuple(json.loads(row.machines)),
        row.start,
        int(row.job.rpartition("_")[2]) if row.array else None,
        json.loads(row.request) if _is_fresh(row) else {},
        tuple(json.loads(row.signals)),
        secrets.get(row.job, {}),
        row.tenant,
    )


def _state(report: NodeReport, wanted: Mapping[str, Any], known: Row[Any]) -> str:
    fenced = bool(unwanted_starts(report, wanted))
    return node_state(reports=True, fenced=fenced, cordoned=bool(known.cordoned), problems=report.problems)


def _news(report: NodeReport, rows: Mapping[str, Row[Any]]) -> list[StartReport]:
    """What a report says of wanted starts beyond what is known of them."""
    return [
        start for start in report.starts if start.key in rows and _order(start.state) > _order(rows[start.key].state)
    ]


def _by_key(rows: Sequence[Row[Any]]) -> dict[str, Row[Any]]:
    return {start_key(row.job, row.start, row.rank): row for row in rows}


def _order(state: str) -> int:
    return ("granted", "issued", "running", "exited").index(state)
