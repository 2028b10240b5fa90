"""Machines that are network namespaces, connected to a switch, whose cables tests pull; root only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass
class Network:
    """Three machines and a switch."""

    name: str = f"hw{os.getpid()}"

    def make(self) -> None:
        """Create everything but the switch's namespace."""
        within(self.switch, "ip", "link", "add", "switch", "type", "bridge")
        within(self.switch, "ip", "link", "set", "switch", "up")
        for number in range(3):
            space, cable = self.space(number), f"cable{number}"
            run("ip", "netns", "add", space)
            within(self.switch, "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            within(self.switch, "ip", "link", "set", cable, "master", "switch", "up")
            within(space, "ip", "link", "set", "lo", "up")
            within(space, "ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            within(space, "ip", "link", "set", "eth0", "up")

    def remove(self) -> None:
        for space in (*map(self.space, range(3)), self.switch):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def space(self, number: int) -> str:
        return f"{self.name}-{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def pull(self, number: int) -> None:
        """Pull a machine's cable."""
        within(self.switch, "ip", "link", "set", f"cable{number}", "down")

    def plug(self, number: int) -> None:
        within(self.switch, "ip", "link", "set", f"cable{number}", "up")

    def block(self, first: int, second: int, action: str = "add") -> None:
        """Cut two machines off from each other, while both reach the third."""
        for here, peer in ((first, second), (second, first)):
            within(self.space(here), "ip", "route", action, "blackhole", f"{self.address(peer)}/32")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def within(space: str, *command: str) -> None:
    run("ip", "netns", "exec", space, *command)


def made_network() -> Iterator[Network]:
    """The network of a fixture, removed at its end; the test is skipped where there is no right to make one."""
    network = Network()
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", network.switch], capture_output=True).returncode
    ):
        pytest.skip("cannot create network namespaces here")
    try:
        network.make()
        yield network
    finally:
        network.remove()
