"""Whether a node can leave a run that goes on, and what that does to the run: pure.

The shell is `headway agent leave` (cli/agent.py), which asks the leader (node_group.py). Workers then save and stop,
and start again on the other nodes from that state. The node stays until they have read it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.agent.nodes.members import Member
from headway.agent.supervise.recover import NodeCapacity
from headway.errors import plural


@dataclass(frozen=True)
class LeaveEffect:
    """What happens when a node leaves."""

    refused: bool
    workers: int
    """With how many workers the run continues."""
    text: str


def effect_of_leaving(capacity: NodeCapacity, node: str, has_workers: bool) -> LeaveEffect:
    """What happens when a node leaves; `capacity` includes it."""
    before = capacity.workers
    if not has_workers:
        return LeaveEffect(False, before, "it has no workers")
    workers = capacity.most_workers(without=node)
    if workers is None:
        room = sum(slots for name, slots in capacity.slots if name != node)
        least = min((count for count in capacity.counts if count >= capacity.fewest), default=before)
        return LeaveEffect(
            True,
            before,
            f"node {node} cannot leave: the run needs room for {plural(least, 'worker')}, the other nodes have {room}",
        )
    if workers >= before:
        return LeaveEffect(False, before, f"its workers move to other nodes, {before} as before")
    return LeaveEffect(False, workers, f"the run continues with {workers} of {before} workers")


def leader_stays(node: str, machine: str, processes: Sequence[int]) -> str:
    """Why the leading node cannot leave, and how another comes to lead. `processes` are the node's command, launcher
    and agent: without one of them the others would continue to lead."""
    pids = " ".join(map(str, processes))
    return (
        f"node {node} leads the run and cannot leave; kill -9 {pids} on {machine} makes another node the leader, which "
        "resumes from the newest copy in memory"
    )


def node_of_machine(machine: str, members: Mapping[str, Member]) -> tuple[str | None, str]:
    """The only node of a machine; else None and what is wrong. `headway agent` names nodes MACHINE-RANK."""
    names = sorted(
        member.name for member in members.values() if machine in (member.machine, member.name.rpartition("-")[0])
    )
    if len(names) == 1:
        return names[0], ""
    return None, f"machine {machine} has {len(names) or 'no'} nodes of this run: name the one that leaves"
