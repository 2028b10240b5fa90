"""Collectives against published bandwidths, by hand, and as properties."""

import pytest

from headway.hardware import parse_on
from headway.plan.collective_times import DeviceGroup, NetworkModel, collective_seconds

GIB = 2**30


def bus_bandwidth(on: str, operation: str, size: float, members: int, **shares: float) -> float:
    """Bus bandwidth as nccl-tests define it."""
    seconds = collective_seconds(NetworkModel(parse_on(on), **shares), operation, size, DeviceGroup(members))
    passes = 2 if operation == "all_reduce" else 1
    return passes * size * (members - 1) / members / seconds


@pytest.mark.parametrize(
    ("on", "operation", "size", "members", "published"),
    [  # stas00/ml-engineering, network (2024 to 2026), GB/s
        ("h200x8", "all_gather", 16 * GIB, 8, 361.4e9),
        ("h200x8", "reduce_scatter", 16 * GIB, 8, 362.9e9),
        ("a100x8", "all_reduce", 16 * GIB, 8, 234.9e9),
        ("b200x8x4", "all_reduce", 4 * GIB, 32, 377e9),
        ("h200x8x4", "all_reduce", 4 * GIB, 32, 365e9),
    ],
)
def test_large_collectives_reach_published_bandwidth(
    on: str, operation: str, size: float, members: int, published: float
) -> None:
    assert bus_bandwidth(on, operation, size, members) == pytest.approx(published, rel=0.15)


def test_all_gather_inside_a_node_by_hand() -> None:
    """Seven eighths of the tensor arrive over NVLink; seven hops of latency and the start come on top."""
    network = NetworkModel(parse_on("h100x8"), near=0.8, start_s=10e-6, latency=2.0)
    seconds = collective_seconds(network, "all_gather", 8e9, DeviceGroup(8))
    assert seconds == pytest.approx(8e9 * 7 / 8 / (450e9 * 0.8) + 2 * (7 * 2e-6 + 10e-6))


def test_network_ports_limit_collectives_across_nodes() -> None:
    """Two nodes of eight: all but a sixteenth crosses each node boundary, over eight ports."""
    network = NetworkModel(parse_on("h100x8x2"), near=1.0, far=1.0, latency=0.0)
    seconds = collective_seconds(network, "all_gather", 16e9, DeviceGroup(16))
    assert seconds == pytest.approx(16e9 * 15 / 16 / (8 * 50e9))


def test_a_group_with_one_member_per_node_uses_one_port() -> None:
    network = NetworkModel(parse_on("h100x8x4"), far=1.0, latency=0.0)
    assert collective_seconds(network, "all_gather", 4e9, DeviceGroup(4, stride=8)) == pytest.approx(4e9 * 3 / 4 / 50e9)


def test_groups_of_one_communicate_nothing() -> None:
    network = NetworkModel(parse_on("h100x8"))
    assert collective_seconds(network, "all_reduce", 1e9, DeviceGroup(1)) == 0.0
    assert collective_seconds(network, "all_gather", 0, DeviceGroup(8)) == 0.0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_collectives_slow_down_with_size_and_distance(operation: str) -> None:
    network = NetworkModel(parse_on("h100x8x16"))
    times = [collective_seconds(network, operation, size, DeviceGroup(8)) for size in (1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert collective_seconds(network, operation, 1e9, DeviceGroup(8, stride=8)) > times[-1]


def test_all_to_all_is_limited_by_traffic_between_nodes() -> None:
    """Of 64 devices' tokens seven eighths leave each node of eight, one port per device."""
    network = NetworkModel(parse_on("h100x8x8"), far=1.0, latency=0.0)
    assert collective_seconds(network, "all_to_all", 1e9, DeviceGroup(64)) == pytest.approx(1e9 * 56 / 64 / 50e9)
