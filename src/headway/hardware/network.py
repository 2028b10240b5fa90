"""Detects network interfaces and RDMA devices, and chooses the transport and variables for NCCL and gloo.

`transport` is a pure function of what was detected. Untested on InfiniBand, RoCE and EFA: the rules are those that NCCL
documents, and variables that are already set win.
"""

import ctypes.util
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

VIRTUAL = re.compile(r"(docker|br-|veth|virbr|cni|flannel|cali|lxc|tun|tap|wg|kube)")
"""Interfaces of containers and tunnels, which do not reach other machines' GPUs."""


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface."""

    name: str
    up: bool
    gigabits_s: float
    """As the driver reports; 0 if unknown."""
    addresses: tuple[str, ...] = ()
    mtu: int = 0

    @property
    def loopback(self) -> bool:
        """Whether all addresses are loopback."""
        return bool(self.addresses) and all(ipaddress.ip_address(address).is_loopback for address in self.addresses)


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device."""

    name: str
    kind: Literal["InfiniBand", "RoCE", "EFA"]
    active: bool
    gigabits_s: float
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostNetwork:
    """The network hardware of this machine."""

    interfaces: tuple[NetworkInterface, ...]
    rdma: tuple[RdmaDevice, ...] = ()
    gpudirect: bool = False
    """Whether the kernel lets network cards read GPU memory (nvidia_peermem)."""
    efa_plugin: bool = False
    """Whether NCCL finds the plugin that EFA needs."""


@dataclass(frozen=True)
class Transport:
    """What NCCL would use between machines."""

    name: Literal["InfiniBand", "RoCE", "EFA", "TCP", "none"]
    why: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for NCCL and gloo."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Those that were already set."""


_Choice = tuple[Literal["InfiniBand", "RoCE", "EFA", "TCP", "none"], str, dict[str, str]]


def find_network(sys: Path = Path("/sys")) -> HostNetwork:
    """Detect this machine's network."""
    return HostNetwork(
        interfaces=_interfaces(),
        rdma=tuple(_rdma(path) for path in sorted((sys / "class/infiniband").glob("*"))),
        gpudirect=(sys / "module/nvidia_peermem").exists(),
        efa_plugin=any(ctypes.util.find_library(name) for name in ("nccl-net", "nccl-net-ofi")),
    )


def _interfaces() -> tuple[NetworkInterface, ...]:
    addresses = psutil.net_if_addrs()
    interfaces = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        own = [item.address.partition("%")[0] for item in addresses.get(name, []) if _is_address(item.address)]
        speed = stats.speed / 1000 if 0 < stats.speed < 2**31 else 0.0  # some drivers report -1 for unknown
        interfaces.append(NetworkInterface(name, stats.isup, speed if speed < 10_000 else 0.0, tuple(own), stats.mtu))
    return tuple(interfaces)


def _rdma(path: Path) -> RdmaDevice:
    """Read a folder of /sys/class/infiniband."""
    ports = sorted((path / "ports").glob("*"))
    states = [_text(port / "state") for port in ports]
    layers = {_text(port / "link_layer") for port in ports}
    rates = [float(match[0]) for port in ports if (match := re.match(r"[\d.]+", _text(port / "rate")))]
    driver = path / "device" / "driver"
    kind: Literal["InfiniBand", "RoCE", "EFA"] = "RoCE" if layers == {"Ethernet"} else "InfiniBand"
    if (driver.exists() and driver.resolve().name == "efa") or path.name.startswith(("efa", "rdmap")):
        kind = "EFA"
    interfaces = tuple(sorted(entry.name for entry in (path / "device" / "net").glob("*")))
    return RdmaDevice(path.name, kind, any("ACTIVE" in state for state in states), max(rates, default=0.0), interfaces)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def transport(network: HostNetwork, environment: Mapping[str, str] | None = None, host: str | None = None) -> Transport:
    """Choose the transport between machines and its variables; those already set win.

    `host` is this machine's address as others reach it: sockets use its interface, or the fastest one without it. If it
    is loopback, all nodes of a run are this machine.
    """
    environment = os.environ if environment is None else environment
    reached = (interface for interface in network.interfaces if host in interface.addresses)
    interface = next(reached, None) or _fastest_interface(network.interfaces)
    name, why, variables = _choose(network, interface)
    if host is not None and interface is not None and interface.loopback:
        name, why, variables = "none", "all nodes are this machine", {}
    if interface is not None:
        variables = {"GLOO_SOCKET_IFNAME": interface.name, "NCCL_SOCKET_IFNAME": interface.name, **variables}
    kept = {key: environment[key] for key in variables if key in environment}
    return Transport(name, why, {**variables, **kept}, kept)


def main_address() -> str:
    """This machine's address as others reach it: that of the interface of the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address; nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _choose(network: HostNetwork, interface: NetworkInterface | None) -> _Choice:
    active = [device for device in network.rdma if device.active]
    direct = "GPUDirect RDMA" if network.gpudirect else "through host memory: no nvidia_peermem"
    if interface is None:
        return "none", "no interface to other machines", {}
    efa = [device for device in active if device.kind == "EFA"]
    if efa and network.efa_plugin:
        return "EFA", f"{_devices(efa)}, with NCCL's plugin", {"FI_PROVIDER": "efa"}
    for kind in ("InfiniBand", "RoCE"):
        cards = [device for device in active if device.kind == kind]
        if cards:
            # With "=" NCCL matches names exactly, not by prefix.
            names = "=" + ",".join(device.name for device in cards)
            return kind, f"{_devices(cards)}; {direct}", {"NCCL_IB_HCA": names}
    if efa:
        why = f"{_devices(efa)}, but NCCL's plugin (libnccl-net of aws-ofi-nccl) is not installed"
    elif network.rdma:
        why = f"no port of {', '.join(device.name for device in network.rdma)} is active"
    else:
        why = "no RDMA device"
    return "TCP", why, {"NCCL_IB_DISABLE": "1"}


def _fastest_interface(interfaces: Sequence[NetworkInterface]) -> NetworkInterface | None:
    """The fastest interface that is up, not virtual, and has an IPv4 address."""
    physical = [card for card in interfaces if card.up and not card.loopback and not VIRTUAL.match(card.name)]
    usable = [card for card in physical if any(":" not in address for address in card.addresses)]
    return max(usable, key=lambda interface: interface.gigabits_s, default=None)


def _devices(cards: Sequence[RdmaDevice]) -> str:
    rate = sum(card.gigabits_s for card in cards)
    return f"{', '.join(card.name for card in cards)}: {rate:g} Gb/s in total"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
