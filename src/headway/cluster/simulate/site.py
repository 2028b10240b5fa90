"""A cluster's hosts, network topology, tenants and maintenance, read from files.

Hosts are a CSV file, gzipped or not, with a line per host: its name, then its network domain per level, from the
smallest. Domains are nested: switch S6 of P8 is not S6 of P10. Tenants are in cluster.toml, parents first:

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

Scheduled maintenance is a CSV file too, with a line per node: node,from_s,to_s.
"""

import csv
import io
import tomllib
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate.job_trace import check_columns, read_number, read_text
from headway.errors import UsageError, plural

AWAY = ("node", "from_s", "to_s")


@dataclass(frozen=True)
class Tenant:
    """A team that shares the cluster."""

    name: str
    guarantee: int = 0
    parent: str | None = None
    borrow: int | None = None
    lend: int | None = None
    budget_gpu_h: float | None = None
    """Per month."""


@dataclass(frozen=True)
class NodeMaintenance:
    """Maintenance of one node."""

    node: str
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Site:
    """What is known of a cluster besides its size."""

    hosts: tuple[str, ...] = ()
    """Empty: nodes are numbered."""
    domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Domain of each host per level, from the smallest."""
    tenants: tuple[Tenant, ...] = ()
    """Empty: those of the trace, with guarantees in proportion to their demand."""
    away: tuple[NodeMaintenance, ...] = ()
    """Scheduled maintenance."""

    def add_nodes(self, snapshot: ClusterSnapshot, chip: str, per_node: int, nodes: int, spares: int) -> None:
        """Add the nodes to an empty snapshot."""
        if self.hosts and len(self.hosts) != nodes:
            raise UsageError(
                f"the topology has {plural(len(self.hosts), 'host')}, but the cluster has {plural(nodes, 'node')}",
                hint=f"--on {chip}x{per_node}x{len(self.hosts)}",
            )
        names = self.hosts or [f"node-{number:04}" for number in range(nodes)]
        snapshot.nodes.add_pool(chip, per_node, names, self.domains or None, spares)

    def add_tenants(self, snapshot: ClusterSnapshot) -> None:
        """Add the tenants to a snapshot."""
        for tenant in self.tenants:
            snapshot.tenants.add_tenant(*astuple(tenant))


def read_topology(file: Path) -> Site:
    """Read hosts and their network domains; UsageError names the line of the first mistake."""
    lines = csv.reader(io.StringIO(read_text(file, "a CSV file of hosts")))
    head = [name.strip() for name in next(lines, [])]
    if len(head) < 2 or len(set(head)) < len(head):
        raise UsageError(f"{file}: line 1 must name the host and the network levels", hint="host,rack,block")
    hosts, paths = dict[str, int](), list[list[str]]()
    for row in lines:
        values, where = [value.strip() for value in row], f"{file}: line {lines.line_num}"
        if not any(values):
            continue
        if len(values) != len(head) or not all(values):
            raise UsageError(f"{where}: expected values for {', '.join(head)}, got {','.join(values)}")
        if values[0] in hosts:
            raise UsageError(f"{where}: duplicate host '{values[0]}'")
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
    """Read scheduled maintenance; UsageError names the line of the first mistake."""
    lines = csv.DictReader(io.StringIO(read_text(file, "a CSV file of node maintenance")))
    check_columns(file, lines.fieldnames or (), AWAY, ())
    windows = dict[str, NodeMaintenance]()
    for line in lines:
        where, node = f"{file}: line {lines.line_num}", (line["node"] or "").strip()
        window = NodeMaintenance(node, read_number(where, line, "from_s"), read_number(where, line, "to_s"))
        if not node:
            raise UsageError(f"{where}: no node name")
        if node in windows:
            raise UsageError(f"{where}: duplicate node '{node}'", hint="one maintenance window per node")
        if window.from_s >= window.to_s:
            raise UsageError(f"{where}: maintenance of {node} ends at {window.to_s:g} s, not after {window.from_s:g} s")
        windows[node] = window
    return tuple(windows.values())


def read_site(file: Path) -> Site:
    """Read tenants, topology and maintenance of a cluster.toml; `load_cluster` reads the rest."""
    values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    site = read_topology(file.parent / values["topology"]) if "topology" in values else Site()
    away = read_away(file.parent / values["away"]) if "away" in values else ()
    tenants = tuple(_read_tenant(file, number, tenant) for number, tenant in enumerate(values.get("tenant", ()), 1))
    return Site(site.hosts, site.domains, tenants, away)


def _read_tenant(file: Path, number: int, values: dict[str, Any]) -> Tenant:
    known = [key.name for key in fields(Tenant)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise UsageError(f"{file}: unknown tenant key '{unknown[0]}'", hint=f"known keys: {', '.join(known)}")
    if "name" not in values:
        raise UsageError(f"{file}: tenant {number} has no name")
    gpus = (int, "a whole number of GPUs")
    types: dict[str, tuple[Any, str]] = {"name": (str, "a string"), "parent": (str, "a string")}
    types |= {"guarantee": gpus, "borrow": gpus, "lend": gpus, "budget_gpu_h": (int | float, "GPU-hours per month")}
    for key, value in values.items():
        if not isinstance(value, types[key][0]):
            raise UsageError(f"{file}: tenant {number}: {key} is {value!r}", hint=types[key][1])
    return Tenant(**values)
