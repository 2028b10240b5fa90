"""The record as events for people: what happened to which job or node, in a sentence each. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.cluster.service.grants import LiveDecision, decode
from headway.cluster.service.visibility import OTHER_JOB, own_reason
from headway.errors import plural


@dataclass(frozen=True)
class ClusterEvent:
    """One thing that happened."""

    seq: int
    """Of its line in the record, from 1."""
    at_s: float
    """Seconds of the scheduler's time."""
    kind: str
    sentence: str
    job: str | None = None
    node: str | None = None


def events_of(seq: int, line: Mapping[str, Any], mine: Collection[str] | None = None) -> Iterator[ClusterEvent]:
    """Yield the events of a line of the record; `mine` are the jobs that sentences may name, None all."""
    at_s = float(line["at"])
    if "decided" in line:
        for fields in line["decided"]:
            decision = decode(fields)
            yield ClusterEvent(seq, at_s, decision.kind, _decided(decision, mine), decision.job)
        return
    if "cluster" in line:
        yield ClusterEvent(seq, at_s, "cluster", _cluster(line["cluster"]))
        return
    if "node" in line:
        state = {"healthy": "reports and takes jobs", "draining": "takes no new jobs"}.get(line["state"], line["state"])
        yield ClusterEvent(seq, at_s, "node", f"node {line['node']} {state}", node=line["node"])
        return
    if "maintenance" in line:
        window = "has no maintenance ahead" if line["away_s"] is None else "will be away for maintenance"
        yield ClusterEvent(seq, at_s, "maintenance", f"node {line['maintenance']} {window}", node=line["maintenance"])
        return
    kind = next((kind for kind in _SENTENCES if kind in line), None)
    if kind is not None:
        name = line["job"]["name"] if kind == "job" else line[kind]
        yield ClusterEvent(seq, at_s, kind, _SENTENCES[kind](line), name)


def _submitted(line: Mapping[str, Any]) -> str:
    job = line["job"]
    *smaller, largest = [gpus for gpus, _ in job.get("sizes", ())] or [job["gpus"]]
    gpus = f"{', '.join(map(str, smaller))} or {largest} GPUs" if smaller else plural(largest, "GPU")
    return f"queued by tenant {job['tenant']}: {gpus}, priority {job.get('priority', 0)}"


def _exited(line: Mapping[str, Any]) -> str:
    if not line.get("again"):
        return f"over: {line.get('state', 'cancelled')}"
    return "exited and waits again; " + (
        "its work is saved" if line.get("saved") else "work since its last save is lost"
    )


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "job": _submitted,
    "running": lambda _: "runs",
    "stopping": lambda _: "told to stop by a user or for a lost node",
    "exited": _exited,
    "saves": lambda line: "has saved" if line["age_s"] is not None else "reports its saves",
    "priority": lambda line: f"has priority {line['to']} now",
    "hold": lambda _: "held by a user",
    "unhold": lambda _: "released by a user",
}

_KINDS = {"stop": "stops", "move": "moves", "resize": "stops to change its size", "reserve": "waits"}


def _decided(decision: LiveDecision, mine: Collection[str] | None) -> str:
    reason = (decision.reason if mine is None else own_reason(decision.reason, mine)).sentence
    if decision.kind == "start":
        on = ", ".join(f"{node} GPUs {','.join(ids)}" if ids else node for node, ids in decision.grant)
        others = ", ".join(decision.after if mine is None else [OTHER_JOB])
        after = f", once {others} has exited" if decision.after else ""
        return f"starts on {on}{after}: {reason}"
    return f"{_KINDS.get(decision.kind, decision.kind)}: {reason}"


def _cluster(cluster: Mapping[str, Any]) -> str:
    nodes, tenants = cluster["nodes"], cluster["tenants"]
    gpus = plural(sum(len(node["gpus"]) for node in nodes), "GPU")
    counts = f"{plural(len(nodes), 'node')} with {gpus}, {plural(len(tenants), 'tenant')}"
    return f"the cluster has {counts}, policy {cluster['policy']}"
