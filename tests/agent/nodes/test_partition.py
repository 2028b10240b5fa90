"""Machines that cannot hear each other for a while: network namespaces, a cable each to a switch in one of its own.

All of them see the run's folder all the time, so that nothing but the leases keeps two agents from leading at once.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from machines import Machines, machines

from conftest import Lived
from headway.agent.nodes.lease import newest_lease

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
]

SETTINGS = {
    "train.steps": 150,
    "train.restarts": 3,
    "checkpoint.every_steps": 50,
    "checkpoint.memory_every_steps": 1,
}


@dataclass
class Network:
    """Three machines and a switch."""

    name: str = f"hw{os.getpid()}"

    def make(self) -> None:
        """All but the switch's own namespace, which is there."""
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

    def part(self, one: int, other: int, do: str = "add") -> None:
        """Have two machines not reach each other, though both reach the third."""
        for here, there in ((one, other), (other, one)):
            within(self.space(here), "ip", "route", do, "blackhole", f"{self.address(there)}/32")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def within(space: str, *words: str) -> None:
    run("ip", "netns", "exec", space, *words)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", made.switch], capture_output=True).returncode
    ):
        pytest.skip("network namespaces cannot be made here")
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture
def there(network: Network, recipe, tmp_path) -> Iterator[Machines]:
    """Two machines with a worker each, and a spare, that have trained for a while."""
    more = {"prefix": lambda number: ("ip", "netns", "exec", network.space(number)), "host": network.address}
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2, **more) as made:
        for number in range(3):
            made.start(number)
        made.until(lambda: made.copied() > 20)
        yield made


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """Two workers on one node, that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


def assert_ends_well(there: Machines, unharmed: Lived) -> None:
    assert there.ends() == {0: 0, 1: 0, 2: 0}, there.said()
    there.assert_same_end(unharmed)


def test_a_link_is_cut_and_healed(there: Machines, network: Network, unharmed: Lived) -> None:
    """A machine that does not lead: a spare takes its place, and it is the spare when it is back."""
    network.pull(1)
    there.until(lambda: len(there.events("attempt")) == 2)
    network.plug(1)
    assert_ends_well(there, unharmed)
    (told,) = there.ways_on
    assert re.fullmatch(r"node \S+-1 was lost: it has said nothing for 5 s; resuming from step \d+ \(memory\)", told)
    assert newest_lease(there.run.leases).lead.endswith("-0")


def test_the_smaller_part_stops_itself_though_it_led(there: Machines, network: Network, unharmed: Lived) -> None:
    network.pull(0)
    there.until(lambda: len(there.events("attempt")) == 2)
    lease = newest_lease(there.run.leases)
    assert not lease.lead.endswith("-0")
    there.until(lambda: "another machine's agent leads this run now" in there.said())
    network.plug(0)
    assert_ends_well(there, unharmed)
    (told,) = there.ways_on
    assert re.fullmatch(r"leader \S+-0 was lost; \S+ is the new leader; resuming from step \d+ \(memory\)", told)
    assert newest_lease(there.run.leases) == lease


def test_two_that_do_not_hear_each_other_while_a_third_hears_both(
    there: Machines, network: Network, unharmed: Lived
) -> None:
    """Nobody takes the lead from one that others hear."""
    network.part(0, 1)
    there.until(lambda: len(there.events("attempt")) == 2)
    network.part(0, 1, do="delete")
    assert_ends_well(there, unharmed)
    assert newest_lease(there.run.leases).lead.endswith("-0")
