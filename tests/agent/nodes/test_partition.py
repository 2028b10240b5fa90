"""Network partitions between machines: a network namespace each, connected to a switch.

All of them see the run's folder all the time, so only the leases keep two agents from leading at once.
"""

import os
import re
from collections.abc import Iterator

import pytest
from machines import Machines, make_machines

from conftest import Lived
from headway.agent.nodes.lease import newest_lease
from namespaces import Network, made_network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SETTINGS = {
    "train.steps": 150,
    "train.restarts": 3,
    "checkpoint.every_steps": 50,
    "checkpoint.memory_every_steps": 1,
}


@pytest.fixture
def network() -> Iterator[Network]:
    yield from made_network()


@pytest.fixture
def cluster(network: Network, recipe, tmp_path) -> Iterator[Machines]:
    """Two machines with one worker each, and a spare, after some training."""
    more = {"prefix": lambda number: ("ip", "netns", "exec", network.space(number)), "host": network.address}
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=1, workers=2, **more) as machines:
        for number in range(3):
            machines.start(number)
        machines.until(lambda: machines.copied() > 20)
        yield machines


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_lab, recipe) -> Lived:
    """An undisturbed run of two workers on one node."""
    lived = make_lab(tmp_path_factory.mktemp("reference")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


def assert_ends_well(cluster: Machines, reference: Lived) -> None:
    assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.output()
    cluster.assert_same_end(reference)


def test_link_is_cut_and_restored(cluster: Machines, network: Network, reference: Lived) -> None:
    """Of a machine that does not lead: a spare replaces it, and it is a spare when it is back."""
    network.pull(1)
    cluster.until(lambda: len(cluster.events("attempt")) == 2)
    network.plug(1)
    assert_ends_well(cluster, reference)
    (recovery,) = cluster.recoveries
    assert re.fullmatch(
        r"node \S+-1 was lost: its agent has sent nothing for 5 s; resuming from step \d+ \(memory\)", recovery
    )
    assert newest_lease(cluster.run.leases).lead.endswith("-0")


def test_former_leader_steps_down_after_partition(cluster: Machines, network: Network, reference: Lived) -> None:
    network.pull(0)
    cluster.until(lambda: len(cluster.events("attempt")) == 2)
    lease = newest_lease(cluster.run.leases)
    assert not lease.lead.endswith("-0")
    cluster.until(lambda: "another machine's agent leads this run now" in cluster.output())
    network.plug(0)
    assert_ends_well(cluster, reference)
    (recovery,) = cluster.recoveries
    assert re.fullmatch(r"leader \S+-0 was lost; \S+ is the new leader; resuming from step \d+ \(memory\)", recovery)
    assert newest_lease(cluster.run.leases) == lease


def test_no_takeover_while_a_third_machine_hears_the_leader(
    cluster: Machines, network: Network, reference: Lived
) -> None:
    """Two machines cannot reach each other, but both reach the third."""
    network.block(0, 1)
    cluster.until(lambda: len(cluster.events("attempt")) == 2)
    network.block(0, 1, action="delete")
    assert_ends_well(cluster, reference)
    assert newest_lease(cluster.run.leases).lead.endswith("-0")
