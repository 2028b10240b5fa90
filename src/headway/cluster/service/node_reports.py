"""What nodes report, and what is then wanted of them.

A report is complete, and changes the database only if it says more than is known. Repeating one needs no database.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, bindparam, select, update

from headway.cluster.service.fleet import Fleet, JobControl
from headway.cluster.service.job_streams import JobStreams
from headway.cluster.service.messages import NodeOrders, NodeReport, StartReport, WantedStart, start_key
from headway.cluster.service.node_changes import NodeChanges
from headway.cluster.service.node_state import node_state, unwanted_starts
from headway.cluster.service.outcome import RankResult
from headway.cluster.service.roles import lineage_of
from headway.cluster.service.run_progress import JobProgress
from headway.cluster.service.secret_store import SecretStore
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import jobs, node_conditions, nodes, ranks
from headway.errors import UnknownNode, UsageError

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


class NodeReports:
    """Takes the reports of nodes, and answers with their orders."""

    def __init__(
        self,
        store: ServiceStore,
        control: JobControl,
        fleet: Fleet,
        node_changes: NodeChanges,
        secrets: SecretStore,
        streams: JobStreams,
        speed: float,
    ) -> None:
        self._store, self._control, self._fleet, self._node_changes = store, control, fleet, node_changes
        self._secrets, self._streams, self._speed = secrets, streams, speed
        self.progress: dict[str, JobProgress] = {}
        """Of running jobs that report it, since this service has started."""
        self._saves: dict[str, tuple[str, int | None]] = {}
        """Start and step of the newest recorded save of these."""
        self._last_syncs: dict[str, tuple[int, str | None, NodeReport, NodeOrders]] = {}
        """What each node last reported at which version, as whom, and its orders."""

    def repeated(self, report: NodeReport, peer: str | None) -> NodeOrders | None:
        """Return the orders of a report that says nothing new, when nothing else is wanted; None for all others. It
        takes no database, so that thousands of nodes can be held without a thread for each."""
        version = self._node_changes.version(report.node)
        last_sync = self._last_syncs.get(report.node)
        if last_sync is None or last_sync[:3] != (version, peer, report):
            return None
        self._fleet.silence.hear(report.node)
        return last_sync[3]

    def sync(self, report: NodeReport, peer: str | None = None) -> NodeOrders:
        """Take a node's report, and return everything that is wanted of it. `peer` is the fingerprint of the
        certificate that was shown; this machine's own nodes have none."""
        version = self._node_changes.version(report.node)
        if (known_orders := self.repeated(report, peer)) is not None:
            return known_orders
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
        self._fleet.silence.hear(report.node)
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
                self._fleet.set_problems(transaction, report.node, problems)
                self._fleet.set_state(transaction, report.node, _state(report, rows, known))
                transaction.add_lines([line for line in saves if self._runs(transaction, line["saves"])])
                for start in _news(report, rows):
                    self._take_report(transaction, rows[start.key], start.state, start.result)
                rows = _by_key(transaction.execute(_WANTED, {"name": report.node}).all())
            self._control.nodes_changed({report.node, *transaction.nodes})
        if unwanted_starts(report, rows):  # they are killed first
            begun = {start.key for start in report.starts}
            rows = {key: row for key, row in rows.items() if key in begun}
        values = self._secret_values(list(rows.values()))
        counts = self._gpu_counts(list(rows.values()))
        starts = tuple(_wanted_start(row, values, counts.get((row.job, row.start), ())) for row in rows.values())
        streams = self._streams.wanted(report.node)
        cluster, give_up_s = self._store.cluster, self._fleet.give_up_after_s
        orders = NodeOrders(self._store.epoch, cluster, starts, give_up_s, streams)
        if not any(values.values()):
            self._last_syncs[report.node] = version, peer, report, orders
        return orders

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
                age_s = None if saved is None else max(self._control.wall_s - saved, 0.0) * self._speed
                lines.append({"at": self._control.now_s, "saves": row.job, "age_s": age_s})
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
        tenants = (self._store.lines.cluster or {}).get("tenants", ())
        with self._store.read() as connection:
            return {
                row.job: self._secrets.values(connection, row.job, lineage_of(tenants, row.tenant), names[row.job])
                for row in rows
                if names.get(row.job)
            }

    def _gpu_counts(self, rows: Sequence[Row[Any]]) -> dict[tuple[str, int], tuple[int, ...]]:
        """The GPUs on each machine of what a node is to start, by job and start."""
        fresh = [row for row in rows if _is_fresh(row)]
        counts = dict[tuple[str, int], tuple[int, ...]]()
        counts |= {(row.job, row.start): (len(json.loads(row.gpus)),) for row in fresh}
        spread = sorted({row.job for row in fresh if len(json.loads(row.machines)) > 1})
        if not spread:
            return counts
        of_all = select(ranks.c.job, ranks.c.start, ranks.c.gpus).where(ranks.c.job.in_(spread)).order_by(ranks.c.rank)
        with self._store.read() as connection:
            known = connection.execute(of_all).all()
        gathered = dict[tuple[str, int], tuple[int, ...]]()
        for row in known:
            key = row.job, row.start
            gathered[key] = (*gathered.get(key, ()), len(json.loads(row.gpus)))
        return counts | gathered

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
            now = {"state": "running", "reason": "", "started": self._control.wall_s}
            if transaction.execute(update(jobs).where(starting).values(now)).rowcount:
                transaction.add_lines([{"at": self._control.now_s, "running": row.job}])
        if state == "exited":
            if result is not None and (result.error or result.lost) and {*others} - {"exited"}:
                job = transaction.execute(select(jobs).where(jobs.c.id == row.job)).one()
                if job.state in ("starting", "running"):  # the others would wait for it for ever
                    self._control.stop_job(transaction, job, "broken")
            self._control.finish_job(transaction, row.job)


def check_code(store: ServiceStore, digest: str, peer: str | None) -> None:
    """Raise UsageError unless a node has a job with this code; this machine's own nodes are trusted with all."""
    if peer is None:
        return
    mine = node_conditions.c.fingerprint == peer
    on = ranks.join(node_conditions, node_conditions.c.name == ranks.c.node).join(jobs, jobs.c.id == ranks.c.job)
    wanted = select(jobs.c.request).select_from(on).where(mine & (ranks.c.state != "exited"))
    with store.read() as connection:
        requests = connection.execute(wanted).scalars().all()
    if not any(json.loads(request)["site"].get("code") == digest for request in requests):
        raise UsageError(f"no job on this node has code {digest[:12]}")


def _is_fresh(row: Row[Any]) -> bool:
    """Whether a node is still to begin a start."""
    return bool(row.state == "issued" and row.job_state != "ending")


def _wanted_start(
    row: Row[Any], secrets: Mapping[str, dict[str, str] | None], gpu_counts: tuple[int, ...]
) -> WantedStart:
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
        gpu_counts,
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
