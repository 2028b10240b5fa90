"""What the scheduler knows of a live cluster: a fold over the lines of its record.

Each line is one JSON object with the time `at` and one of these keys:

    cluster      nodes, tenants and policy; again whenever these change
    calendar     Unix seconds, once per start of the service: its clock stands still while none runs
    job          a job was submitted
    running      the nodes of a starting job have confirmed that it runs
    stopping     a user had a running job stopped
    exited       a job has exited, and waits `again` or is over; `saved` if its work up to then counts
    saves        a running job reports its saves: the age of the newest of this start, `age_s`, if there is one
    priority     a job has another priority, `to`
    hold, unhold a user took a waiting job out of the queue, or put it back
    node         a node is healthy, draining or quarantined
    maintenance  a node is to be empty from `away_s` to `back_s`, or not any more
    decided      the decisions of a cycle, with their placements

Nothing else changes the state, so reading the lines restores it at any time, and each cycle can be decided again.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.jobs import ANY_POOL, Job, job_from_json
from headway.cluster.scheduler.nodes import STATES
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.service.grants import (
    Holdings,
    LiveDecision,
    decode,
    encode,
    grant_decisions,
    kept_by_stopped,
    placement_of,
)
from headway.errors import UsageError

Line = Mapping[str, Any]


@dataclass
class LiveState:
    """The snapshot, and which job holds which GPUs."""

    snapshot: ClusterSnapshot = field(default_factory=ClusterSnapshot)
    holdings: Holdings = field(default_factory=Holdings)
    history: JobHistory = field(default_factory=JobHistory)
    pool_tenants: tuple[tuple[str, ...] | None, ...] = ()
    """Whose jobs the nodes of each pool run; None: all."""
    policy: Policy = POLICIES["headway"]

    def to_json(self) -> str:
        """Return the state as JSON for `from_json`, after which it decides the same."""
        values = {
            "format": 1,
            "policy": self.policy.name,
            "ids": self.holdings.ids,
            "grants": self.holdings.grants,
            "pool_tenants": self.pool_tenants,
            "history": self.history.to_json(),
        }
        return json.dumps(values)[:-1] + f', "snapshot": {self.snapshot.to_json(None)}}}'

    @classmethod
    def from_json(cls, text: str) -> "LiveState":
        """Return the state that `to_json` wrote."""
        values = json.loads(text)
        if values["format"] != 1:
            raise UsageError(f"unknown format {values['format']} of a fold")
        holdings = Holdings(
            {node: tuple(ids) for node, ids in values["ids"].items()},
            {job: tuple((node, tuple(ids)) for node, ids in grant) for job, grant in values["grants"].items()},
        )
        snapshot = ClusterSnapshot.from_values(values["snapshot"])
        return cls(
            snapshot,
            holdings,
            JobHistory.from_json(values["history"]),
            policy=POLICIES[values["policy"]],
            pool_tenants=tuple(values["pool_tenants"]),
        )

    def apply_all(self, lines: Iterable[Line]) -> None:
        """Update the state by lines of the record; jobs that were submitted together are added together."""
        for at, together in groupby(lines, key=lambda line: line["at"] if "job" in line else None):
            if at is None:
                for line in together:
                    self.apply(line)
            else:
                self._submitted(float(at), [job_from_json(line["job"]) for line in together])

    def _submitted(self, at: float, submitted: list[Job]) -> None:
        self.snapshot.advance(max(at, self.snapshot.now_s))
        for row, job in zip(self.snapshot.submit(submitted), submitted, strict=True):
            self.snapshot.jobs.pools[row] = self._pools_of(job.tenant)
            self.history.submitted(job)

    def apply(self, line: Line) -> None:
        """Update the state by a line of the record."""
        if "job" in line:
            self._submitted(float(line["at"]), [job_from_json(line["job"])])
            return
        snapshot = self.snapshot
        snapshot.advance(max(float(line["at"]), snapshot.now_s))
        if "decided" in line:
            self._apply_decisions([decode(fields) for fields in line["decided"]])
        elif "exited" in line:
            self._exited(line["exited"], again=bool(line.get("again")), saved=bool(line.get("saved")))
        elif "running" in line:
            snapshot.confirm(snapshot.jobs.rows[line["running"]])
        elif "stopping" in line:
            snapshot.tell_to_stop(snapshot.jobs.rows[line["stopping"]])
        elif "saves" in line:
            row = snapshot.jobs.rows[line["saves"]]
            if snapshot.jobs.running[row]:
                snapshot.note_save(row, line["age_s"])
        elif "priority" in line:
            snapshot.jobs.priority[snapshot.jobs.rows[line["priority"]]] = line["to"]
        elif "hold" in line:
            snapshot.hold(snapshot.jobs.rows[line["hold"]])
        elif "unhold" in line:
            snapshot.unhold(snapshot.jobs.rows[line["unhold"]])
        elif "maintenance" in line:
            self._set_maintenance(line["maintenance"], line["away_s"], line["back_s"])
        elif "node" in line:
            snapshot.nodes.state[snapshot.nodes.rows[line["node"]]] = STATES.index(line["state"])
        elif "calendar" in line:  # it never goes back: months that are over stay over
            snapshot.set_calendar(max(float(line["calendar"]), snapshot.unix_zero_s + snapshot.now_s))
        else:
            self._set_cluster(line["cluster"])

    def decide(self, now: float) -> list[LiveDecision]:
        """Return the decisions of a cycle. The state does not change, not even its time: whoever reads the record later
        finds only the cycles that decided something."""
        snapshot = self.snapshot.copy()
        snapshot.advance(max(float(now), snapshot.now_s))
        return grant_decisions(snapshot, self.holdings, decide(snapshot, snapshot.now_s, self.policy))

    def _apply_decisions(self, decisions: list[LiveDecision]) -> None:
        snapshot, jobs = self.snapshot, self.snapshot.jobs
        kept = kept_by_stopped(snapshot, self.holdings, decisions)
        for name, share in kept.items():
            snapshot.tell_to_stop(jobs.rows[name], share)
        for decision in decisions:
            if decision.kind == "start":
                row = jobs.rows[decision.job]
                snapshot.start(row, *placement_of(snapshot, decision.grant))
                jobs.starting[row] = True
                self.holdings.grants[decision.job] = decision.grant

    def _exited(self, name: str, *, again: bool, saved: bool) -> None:
        snapshot, row = self.snapshot, self.snapshot.jobs.rows[name]
        self.holdings.grants.pop(name, None)
        if again:
            snapshot.exited(row, saved=saved)
            return
        if snapshot.jobs.running[row]:
            self.history.ended(name, snapshot.now_s, float(snapshot.worked_s(np.array([row]), snapshot.now_s)[0]))
        else:
            self.history.departed(name)
        snapshot.end(row)

    def _pools_of(self, tenant: str) -> int:
        """The pools that a tenant's jobs may use, as bits."""
        able = [only is None or tenant in only for only in self.pool_tenants]
        return ANY_POOL if all(able) else sum(1 << number for number, usable in enumerate(able) if usable)

    def _set_maintenance(self, name: str, away_s: float | None, back_s: float | None) -> None:
        nodes = self.snapshot.nodes
        if name in nodes.rows:
            row = nodes.rows[name]
            nodes.away_s[row] = math.inf if away_s is None else away_s
            nodes.back_s[row] = -math.inf if back_s is None else back_s
            nodes.has_maintenance = True

    def _set_cluster(self, cluster: Line) -> None:
        """Build the cluster, or change it under the jobs that it has."""
        self.policy = POLICIES[cluster["policy"]]
        values = json.loads(self.snapshot.to_json(None))
        pools, place_of = _pools(cluster["nodes"])
        names_of = {number: pool["nodes"] for number, pool in enumerate(values["pools"])}
        for pool in pools:
            before = {
                name: state for old in values["pools"] for name, state in zip(old["nodes"], old["state"], strict=True)
            }
            pool["away"] = [window for old in values["pools"] for window in old["away"] if window[0] in pool["nodes"]]
            pool["state"] = [before.get(name, "draining") for name in pool["nodes"]]
        self.pool_tenants = tuple(pool.pop("tenants") for pool in pools)
        for job in values["jobs"]:
            job["pools"] = self._pools_of(job["tenant"])
            for key in ("place", "kept"):
                if key in job:
                    moved = [place_of[names_of[job[key]["pool"]][node]] for node in job[key]["nodes"]]
                    job[key] |= {"pool": moved[0][0], "nodes": [node for _, node in moved]}
        sums = {tenant["name"]: tenant for tenant in values["tenants"]}
        values["tenants"] = [
            {"recent": 0.0, "short": 0.0, "spent_gpu_s": 0.0}
            | {key: sums[tenant["name"]][key] for key in ("recent", "short", "spent_gpu_s") if tenant["name"] in sums}
            | {"guarantee": 0, "parent": None, "borrow": None, "lend": None}
            | {key: value for key, value in tenant.items() if key != "budget_gpu_h"}
            | {"budget_gpu_s": 3600 * tenant["budget_gpu_h"] if tenant.get("budget_gpu_h") else "inf"}
            for tenant in cluster["tenants"]
        ]
        self.snapshot = ClusterSnapshot.from_values(values | {"pools": pools})
        self.holdings.ids = {node["name"]: tuple(node["gpus"]) for node in cluster["nodes"]}


def _pools(nodes: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, tuple[int, int]]]:
    """Return pools of nodes of one chip, size and tenants, and where each is: pool and number."""
    pools: dict[tuple[str, int, tuple[str, ...] | None], dict[str, Any]] = {}
    places = {}
    for node in nodes:
        key = node["chip"], len(node["gpus"]), tuple(node["tenants"]) if "tenants" in node else None
        empty: dict[str, Any] = {"nodes": [], "domains": {}, "limits": []}
        pool = pools.setdefault(key, {"chip": key[0], "size": key[1], "tenants": key[2], **empty})
        places[node["name"]] = list(pools).index(key), len(pool["nodes"])
        pool["nodes"].append(node["name"])
        pool["limits"].append([node["name"], node["cpus"], node["memory_bytes"]])
    return list(pools.values()), places


def decided_line(at: float, decisions: list[LiveDecision]) -> dict[str, Any]:
    """Return the line of a cycle's decisions."""
    return {"at": at, "decided": [encode(decision) for decision in decisions]}
