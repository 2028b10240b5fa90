"""Detected interfaces, the choice of transport, and the TCP benchmark."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventually import eventually
from headway.agent.workers import env
from headway.errors import EngineError, UsageError
from headway.hardware.link_bench import LinkRates, listen, measure
from headway.hardware.network import HostNetwork, NetworkInterface, RdmaDevice, find_network, transport

LO = NetworkInterface("lo", True, 0, ("127.0.0.1", "::1"))
ETH = NetworkInterface("eth0", True, 25, ("10.0.0.5",))
FAST = NetworkInterface("ens5", True, 100, ("10.1.0.5",))
DOCKER = NetworkInterface("docker0", True, 400, ("172.17.0.1",))
DOWN = NetworkInterface("eth1", False, 400, ("10.2.0.5",))
IB = RdmaDevice("mlx5_0", "InfiniBand", True, 400)
ROCE = RdmaDevice("mlx5_4", "RoCE", True, 200)
EFA = RdmaDevice("rdmap0s6", "EFA", True, 100)


def test_interfaces_match_the_kernel() -> None:
    network = find_network()
    assert {interface.name for interface in network.interfaces} == {
        path.name for path in Path("/sys/class/net").iterdir() if path.is_dir()
    }
    loopback = next(interface for interface in network.interfaces if interface.name == "lo")
    assert loopback.loopback
    assert loopback.mtu == int(Path("/sys/class/net/lo/mtu").read_text())


def make_card(sys: Path, name: str, driver: str, layer: str, state: str, rate: str) -> None:
    """A device as the kernel shows it."""
    port = sys / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{layer}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text(f"{rate}\n")
    device = sys / "class/infiniband" / name / "device"
    (device / "net" / f"net-{name}").mkdir(parents=True)
    (sys / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(sys / "drivers" / driver)


def test_rdma_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    make_card(tmp_path, "mlx5_0", "mlx5_core", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    make_card(tmp_path, "mlx5_1", "mlx5_core", "Ethernet", "4: ACTIVE", "200 Gb/sec (4X HDR)")
    make_card(tmp_path, "mlx5_2", "mlx5_core", "InfiniBand", "1: DOWN", "10 Gb/sec (4X SDR)")
    make_card(tmp_path, "weird", "efa", "Unspecified", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    network = find_network(tmp_path)
    assert network.rdma == (
        RdmaDevice("mlx5_0", "InfiniBand", True, 400, ("net-mlx5_0",)),
        RdmaDevice("mlx5_1", "RoCE", True, 200, ("net-mlx5_1",)),
        RdmaDevice("mlx5_2", "InfiniBand", False, 10, ("net-mlx5_2",)),
        RdmaDevice("weird", "EFA", True, 100, ("net-weird",)),
    )
    assert network.gpudirect


@pytest.mark.parametrize(
    ("network", "name", "variables"),
    [
        (HostNetwork((LO,)), "none", {}),
        (HostNetwork((LO, DOCKER, DOWN)), "none", {}),
        (HostNetwork((LO, ETH, FAST, DOCKER)), "TCP", {"NCCL_SOCKET_IFNAME": "ens5", "NCCL_IB_DISABLE": "1"}),
        (HostNetwork((LO, ETH), (IB, ROCE)), "InfiniBand", {"NCCL_IB_HCA": "=mlx5_0", "NCCL_SOCKET_IFNAME": "eth0"}),
        (HostNetwork((LO, ETH), (ROCE,)), "RoCE", {"NCCL_IB_HCA": "=mlx5_4"}),
        (HostNetwork((LO, ETH), (RdmaDevice("mlx5_0", "InfiniBand", False, 400),)), "TCP", {"NCCL_IB_DISABLE": "1"}),
        (HostNetwork((LO, ETH), (EFA,), efa_plugin=True), "EFA", {"FI_PROVIDER": "efa"}),
        (HostNetwork((LO, ETH), (EFA,)), "TCP", {"NCCL_IB_DISABLE": "1"}),
    ],
)
def test_transport_choice(network: HostNetwork, name: str, variables: dict[str, str]) -> None:
    chosen = transport(network, {})
    assert chosen.name == name
    assert chosen.why
    assert variables.items() <= chosen.variables.items()
    assert not chosen.kept


def test_variables_already_set_win() -> None:
    chosen = transport(HostNetwork((LO, ETH, FAST)), {"NCCL_SOCKET_IFNAME": "eth0", "OTHER": "x"})
    assert chosen.variables["NCCL_SOCKET_IFNAME"] == "eth0"
    assert chosen.kept == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert "OTHER" not in chosen.variables


@pytest.mark.parametrize(
    ("host", "name", "interface"),
    [
        ("10.0.0.5", "InfiniBand", "eth0"),  # slower than the other, but known to reach the agents
        ("10.1.0.5", "InfiniBand", "ens5"),
        ("127.0.0.1", "none", "lo"),
        ("10.9.9.9", "InfiniBand", "ens5"),  # unknown address: the fastest
    ],
)
def test_sockets_use_the_interface_of_the_agents(host: str, name: str, interface: str) -> None:
    chosen = transport(HostNetwork((LO, ETH, FAST), (IB,)), {}, host)
    assert chosen.name == name
    sockets = {chosen.variables["GLOO_SOCKET_IFNAME"], chosen.variables["NCCL_SOCKET_IFNAME"]}
    assert sockets == {interface}
    assert ("NCCL_IB_HCA" in chosen.variables) == (name == "InfiniBand")


def test_node_environment_matches_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_card(tmp_path, "mlx5_0", "mlx5_core", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)")
    host = next(
        interface.addresses[0]
        for interface in find_network().interfaces
        if interface.addresses and not interface.loopback
    )
    monkeypatch.setattr(env, "find_network", lambda: find_network(tmp_path))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    variables = env.network_variables("n7", host)
    assert variables == dict(transport(find_network(tmp_path), host=host).variables)
    assert (variables["NCCL_IB_HCA"], variables["NCCL_SOCKET_IFNAME"]) == ("=mlx5_0", "mine")
    stderr = capsys.readouterr().err
    assert stderr.startswith("n7: between machines InfiniBand (mlx5_0: 400 Gb/s in total; ")
    assert stderr.endswith("set before: NCCL_SOCKET_IFNAME\n")


# -- over the wire


@pytest.fixture
def listener() -> Iterator[Callable[[str | None, int], tuple[str, list[str]]]]:
    """Starts listeners on loopback; returns their address and reports."""
    threads = []

    def start(token: str | None, times: int) -> tuple[str, list[str]]:
        at, reports, listening = list[str](), list[str](), threading.Event()

        def ready(address: str) -> None:
            at.append(address)
            listening.set()

        options = {"ready": ready, "report": reports.append, "times": times}
        threads.append(threading.Thread(target=listen, args=("127.0.0.1:0", token), kwargs=options))
        threads[-1].start()
        assert listening.wait(10)
        return at[0], reports

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_both_directions_are_measured(listener: Callable[[str | None, int], tuple[str, list[str]]]) -> None:
    address, _ = listener(None, 1)
    rates = measure(address, None, 0.2)
    assert isinstance(rates, LinkRates)
    assert min(rates.there_bytes_s, rates.back_bytes_s) > 1e7
    assert rates.round_trip_s > 0


def test_wrong_token_is_refused(listener: Callable[[str | None, int], tuple[str, list[str]]]) -> None:
    address, reports = listener("right", 4)
    host, _, port = address.rpartition(":")
    for token in ("wrong", None):
        with pytest.raises(EngineError, match="wrong or missing token"):
            measure(address, token, 0.1)
    with socket.create_connection((host, int(port)), timeout=10) as talk:
        talk.sendall(b"GET / HTTP/1.1\r\n")
    assert measure(address, "right", 0.1).there_bytes_s > 0
    eventually(lambda: len(reports) >= 4)  # the listener reports after the client has its result
    assert [line.partition(": ")[2].split(":")[0] for line in reports] == [
        "refused",
        "refused",
        "aborted",
        "measured",
    ]


def test_token_is_required_beyond_loopback() -> None:
    with pytest.raises(UsageError, match="needs a token"):
        listen("0.0.0.0:0", None)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000"])
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        measure(address, None)


def test_measuring_without_a_listener_fails() -> None:
    with pytest.raises(EngineError, match="Connection refused"):
        measure("127.0.0.1:9", None)
