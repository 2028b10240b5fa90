"""A cluster as its people have it: its hosts and how the network joins them, and who shares it.

Hosts are a CSV file, gzipped or not, with a line for each: its name first, then its domain of each level of the network
from the smallest. A domain counts as another one below another: switch S6 of P8 is not S6 of P10. Tenants are
in cluster.toml, parents first:

    topology = "hosts.csv"
    away = "away.csv"

    [[tenant]]
    name = "research"
    guarantee = 128

    [[tenant]]
    name = "vision"
    parent = "research"
    guarantee = 64
    borrow = 32
    lend = 16
    budget_gpu_h = 20000

Nodes that will be away to be looked after are a CSV file too, with a line for each: node,from_s,to_s.
"""

import csv
import io
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate.job_trace import check_columns, read_number, read_text
from headway.errors import UsageError

__all__ = ["NodeMaintenance", "Site", "Tenant", "read_away", "read_site", "read_topology"]


AWAY = ("node", "from_s", "to_s")


@dataclass(frozen=True)
class Tenant:
    """One of those who share a cluster."""

    name: str
    guarantee: int = 0
    parent: str | None = None
    borrow: int | None = None
    lend: int | None = None
    budget_gpu_h: float | None = None
    """A month."""


@dataclass(frozen=True)
class NodeMaintenance:
    """A node is away from one time to another."""

    node: str
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Site:
    """What is known of a cluster beside its size."""

    hosts: tuple[str, ...] = ()
    """Empty: they are numbered."""
    domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each level, from the smallest, the domain of each host."""
    tenants: tuple[Tenant, ...] = ()
    """Empty: those of the log, each with a guarantee in proportion to its demand."""
    away: tuple[NodeMaintenance, ...] = ()
    """When nodes are looked after."""

    def join_nodes(self, snapshot: ClusterSnapshot, chip: str, per_node: int, nodes: int, spares: int) -> None:
        """Nodes join an empty snapshot."""
        if self.hosts and len(self.hosts) != nodes:
            raise UsageError(
                f"the topology has {len(self.hosts)} hosts, and the cluster {nodes} nodes",
                hint=f"--on {chip}x{per_node}x{len(self.hosts)}",
            )
        names = self.hosts or [f"node-{number:04}" for number in range(nodes)]
        snapshot.nodes.join(chip, per_node, names, self.domains or None, spares)

    def join_tenants(self, snapshot: ClusterSnapshot) -> None:
        """Tenants join."""
        for one in self.tenants:
            snapshot.tenants.join(one.name, one.guarantee, one.parent, one.borrow, one.lend, one.budget_gpu_h)


def read_topology(file: Path) -> Site:
    """UsageError names the line of the first mistake."""
    lines = csv.reader(io.StringIO(read_text(file, "hosts")))
    head = [name.strip() for name in next(lines, [])]
    if len(head) < 2 or len(set(head)) < len(head):
        raise UsageError(f"{file}: line 1 must name the host and the levels of the network", hint="host,rack,block")
    hosts, paths = dict[str, int](), list[list[str]]()
    for row in lines:
        values, where = [value.strip() for value in row], f"{file}: line {lines.line_num}"
        if not any(values):
            continue
        if len(values) != len(head) or not all(values):
            raise UsageError(f"{where}: a host has {', '.join(head[1:])}, each with a name")
        if values[0] in hosts:
            raise UsageError(f"{where}: host {values[0]} is named twice")
        hosts[values[0]] = len(paths)
        paths.append(values[1:])
    if not paths:
        raise UsageError(f"{file} has no hosts")
    # the path from the top down to the level
    domains = {
        level: tuple("/".join(reversed(path[number:])) for path in paths) for number, level in enumerate(head[1:])
    }
    return Site(tuple(hosts), domains)


def read_away(file: Path) -> tuple[NodeMaintenance, ...]:
    """UsageError names the line of the first mistake."""
    lines = csv.DictReader(io.StringIO(read_text(file, "nodes that will be away")))
    check_columns(file, lines.fieldnames or (), AWAY, ())
    found = dict[str, NodeMaintenance]()
    for line in lines:
        where, node = f"{file}: line {lines.line_num}", (line["node"] or "").strip()
        one = NodeMaintenance(node, read_number(where, line, "from_s"), read_number(where, line, "to_s"))
        if not node:
            raise UsageError(f"{where}: a node without a name")
        if node in found:
            raise UsageError(f"{where}: node {node} is named twice", hint="one time for each node")
        if one.from_s >= one.to_s:
            raise UsageError(f"{where}: node {node} is away from {one.from_s:g} s to {one.to_s:g} s")
        found[node] = one
    return tuple(found.values())


def read_site(file: Path) -> Site:
    """What a cluster.toml says of tenants, topology and nodes that will be away; the rest is `load_cluster`'s."""
    values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    topology = values.get("topology")
    site = Site() if topology is None else read_topology(file.parent / topology)
    away = read_away(file.parent / values["away"]) if "away" in values else ()
    known = [one.name for one in fields(Tenant)]
    tenants = list[Tenant]()
    for number, one in enumerate(values.get("tenant", ())):
        unknown = [key for key in one if key not in known]
        if unknown:
            raise UsageError(f'{file}: a tenant has no key "{unknown[0]}"', hint=f"known are {', '.join(known)}")
        if not isinstance(one.get("name"), str) or not isinstance(one.get("parent", ""), str):
            raise UsageError(f"{file}: tenant {number + 1} has no name, or a parent that is none")
        for key in ("guarantee", "borrow", "lend"):
            if not isinstance(one.get(key, 0), int):
                raise UsageError(f"{file}: tenant {one['name']}: {key} is {one[key]!r}", hint="a whole number of GPUs")
        if not isinstance(one.get("budget_gpu_h", 0), int | float):
            raise UsageError(
                f"{file}: tenant {one['name']}: budget_gpu_h is {one['budget_gpu_h']!r}", hint="GPU-hours a month"
            )
        tenants.append(Tenant(**one))
    return Site(site.hosts, site.domains, tuple(tenants), away)
