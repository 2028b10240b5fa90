"""The best plan for each of several numbers of nodes: what more devices bring, and what they cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.errors import UsageError
from headway.hardware import Cluster, default_cluster
from headway.plan.plan import Plan

__all__ = ["ScalingPoint", "efficiency", "parse_sweep", "resize_cluster", "sweep"]

FORM = "nodes=8..512 doubles from 8 to 512; nodes=8,12,16 takes these"
MOST_NODES = 2**20


@dataclass(frozen=True)
class ScalingPoint:
    """One number of nodes."""

    nodes: int
    devices: int
    plan: Plan | None
    """None where nothing fits or runs."""
    reason: str = ""
    """Why there is no plan."""


def parse_sweep(text: str) -> tuple[int, ...]:
    """`nodes=8..512`, each twice the one before, or `nodes=8,12,16`; rising, each once."""
    key, equals, values = text.replace(" ", "").partition("=")
    if key != "nodes" or not equals:
        raise UsageError(f"--sweep {text}: only nodes can be swept", hint=FORM)
    first, dots, last = values.partition("..")
    numbers = [first, last] if dots else values.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MOST_NODES for number in numbers):
        raise UsageError(f"--sweep {text}: not numbers of nodes", hint=FORM)
    if not dots:
        return tuple(sorted({int(number) for number in numbers}))
    if int(first) > int(last):
        raise UsageError(f"--sweep {text}: {first} is more than {last}", hint=FORM)
    return tuple(_doubling(int(first), int(last)))


def _doubling(first: int, last: int) -> Iterator[int]:
    """From the first, each twice the one before; the last is always among them."""
    number = first
    while number < last:
        yield number
        number *= 2
    yield last


def resize_cluster(cluster: Cluster, nodes: int) -> Cluster:
    """The same kind of cluster with another number of nodes.

    One that is wired as such nodes usually are stays so; otherwise the last level, which joins all devices, grows or
    shrinks, and levels that are then too large go.
    """
    default = default_cluster(cluster.chip, cluster.per_node, cluster.nodes)
    resized = default_cluster(cluster.chip, cluster.per_node, nodes)
    levels = resized.levels
    if cluster.levels != default.levels:
        if resized.devices > cluster.per_node and cluster.levels[-1].devices <= cluster.per_node:
            raise UsageError(
                f"{cluster.name} has one node, and says nothing of links between nodes",
                hint="add a [[level]] that joins nodes to the cluster file, or sweep from --on",
            )
        below = tuple(level for level in cluster.levels[:-1] if level.devices < resized.devices)
        levels = (*below, replace(cluster.levels[-1], devices=resized.devices))
    name = resized.name if cluster.name == default.name else f"{cluster.name} with {nodes} nodes"
    return replace(cluster, name=name, nodes=nodes, levels=levels)


def sweep(
    cluster: Cluster,
    nodes: Sequence[int],
    make: Callable[[Cluster], Plan],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ScalingPoint, ...]:
    """The plan that `make` finds for each number of nodes, or why it finds none."""
    points = []
    for done, count in enumerate(nodes):
        if progress is not None:
            progress(done, len(nodes))
        points.append(_point(resize_cluster(cluster, count), make))
    return tuple(points)


def _point(cluster: Cluster, make: Callable[[Cluster], Plan]) -> ScalingPoint:
    try:
        return ScalingPoint(cluster.nodes, cluster.devices, make(cluster))
    except UsageError as error:
        why = error.message
        if error.hint and "does not fit" in why:
            why = f"does not fit: {error.hint.partition(';')[0]}"
        return ScalingPoint(cluster.nodes, cluster.devices, None, why)


def efficiency(points: Sequence[ScalingPoint], point: ScalingPoint) -> float | None:
    """Tokens a second and device over those of the first point that has a plan."""
    first = next((candidate.plan for candidate in points if candidate.plan is not None), None)
    if first is None or point.plan is None:
        return None
    return point.plan.best.estimate.tokens_s_per_device / first.best.estimate.tokens_s_per_device
