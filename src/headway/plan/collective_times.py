"""Seconds of collectives over groups of devices: an alpha-beta model by algorithm, size and network level."""

import math
from dataclasses import dataclass

from headway.hardware import Cluster, Level

IN_SWITCH = 1.3
"""Time of an in-switch all-reduce over one pass of its bytes: 480 GB/s of bus bandwidth measured on eight H200."""


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of a collective: `size` of them, `stride` apart in device order."""

    size: int
    stride: int = 1


@dataclass(frozen=True)
class NetworkModel:
    """A cluster's links, and the share of their bandwidth that collectives reach."""

    cluster: Cluster
    near: float = 0.8
    """Share of an in-node link's bandwidth."""
    far: float = 0.9
    """Share of a network port's bandwidth."""
    start_s: float = 12e-6
    """Start-up time of a collective."""
    latency: float = 1.0
    """Multiplies the latency of the levels."""

    @property
    def reduces_in_switch(self) -> bool:
        """Whether the node's switches reduce (NVLink SHARP), so that each byte crosses a link about once."""
        return self.cluster.chip.links[0].kind in ("nvlink4", "nvlink5") if self.cluster.chip.links else False


def _spread(cluster: Cluster, group: DeviceGroup) -> tuple[int, Level, Level | None]:
    """Members inside the lowest level, that level, and the level that joins the group (None if the same)."""
    near = cluster.levels[0]
    inside = max(1, min(group.size, near.devices // group.stride)) if group.stride < near.devices else 1
    while group.size % inside:
        inside -= 1
    if inside == group.size:
        return inside, near, None
    return inside, near, cluster.level(min(cluster.devices, group.size * group.stride))


def collective_seconds(network: NetworkModel, operation: str, size: float, group: DeviceGroup) -> float:
    """Seconds of a collective over a full tensor of `size` bytes.

    Full: what all ranks hold after a gather or before a scatter, what is reduced, or what one device sends. Rings pass
    through every member; across nodes each member uses its own port.
    """
    if group.size <= 1 or size <= 0:
        return 0.0
    inside, near, far = _spread(network.cluster, group)
    if operation == "send":
        level, share = (near, network.near) if far is None else (far, network.far)
        return size / (level.effective_bytes_s * share) + (level.latency_s + network.start_s) * network.latency
    if operation == "all_to_all":
        return _all_to_all(network, size, group.size, inside, near, far)
    return _ring(network, operation, size, group.size, inside, near, far)


def _ring(
    network: NetworkModel, operation: str, size: float, members: int, inside: int, near: Level, far: Level | None
) -> float:
    nodes = members // inside
    passes = 2 if operation == "all_reduce" else 1
    rate = near.effective_bytes_s * network.near
    in_node = passes * size * (inside - 1) / inside / rate if inside > 1 else 0.0
    if operation == "all_reduce" and far is None and inside >= 8 and network.reduces_in_switch:
        in_node = size / rate * IN_SWITCH
    hops = passes * (inside - 1) * near.latency_s
    between = 0.0
    if far is not None:
        # a ring carries what the other nodes hold across each node boundary, over one port per member in the node
        between = passes * size * (members - 1) / members / (inside * far.effective_bytes_s * network.far)
        ring = (members - nodes) * near.latency_s + (nodes - 1) * far.latency_s
        tree = math.ceil(math.log2(nodes)) * far.latency_s + (inside - 1) * near.latency_s
        hops = passes * (min(ring, tree) if operation == "all_reduce" else ring)
        in_node = passes * size * (members - 1) / members / rate if inside > 1 else 0.0
    return max(in_node, between) + (hops + network.start_s) * network.latency


def _all_to_all(network: NetworkModel, size: float, members: int, inside: int, near: Level, far: Level | None) -> float:
    stays = size * (inside - 1) / members / (near.effective_bytes_s * network.near)
    if far is None:
        return stays + (near.latency_s + network.start_s) * network.latency
    leaves = size * (members - inside) / members / (far.effective_bytes_s * network.far)
    return max(stays, leaves) + (far.latency_s + network.start_s) * network.latency
