"""Plans a recipe for several cluster sizes: scaling efficiency and cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headway.errors import UsageError, plural
from headway.hardware import Cluster, default_cluster
from headway.plan.plan import Plan

FORM = "nodes=8..512 doubles from 8 to 512; nodes=8,12,16 lists them"
MOST_NODES = 2**20


@dataclass(frozen=True)
class ScalingPoint:
    """The plan for one number of nodes."""

    nodes: int
    devices: int
    plan: Plan | None
    """None if nothing fits or runs."""
    reason: str = ""
    """Why there is no plan."""


def parse_sweep(text: str) -> tuple[int, ...]:
    """Parse `nodes=8..512` (doubling) or `nodes=8,12,16`; sorted, without duplicates."""
    key, equals, values = text.replace(" ", "").partition("=")
    if key != "nodes" or not equals:
        raise UsageError(f"--sweep {text}: only nodes can be swept", hint=FORM)
    first, dots, last = values.partition("..")
    numbers = [first, last] if dots else values.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MOST_NODES for number in numbers):
        raise UsageError(f"--sweep {text}: invalid number of nodes", hint=FORM)
    if not dots:
        return tuple(sorted({int(number) for number in numbers}))
    if int(first) > int(last):
        raise UsageError(f"--sweep {text}: {first} is more than {last}", hint=FORM)
    return tuple(_doubling(int(first), int(last)))


def _doubling(first: int, last: int) -> Iterator[int]:
    """Powers of two times `first` below `last`, then `last`."""
    number = first
    while number < last:
        yield number
        number *= 2
    yield last


def resize_cluster(cluster: Cluster, nodes: int) -> Cluster:
    """The same kind of cluster with another number of nodes.

    Default networks stay default; otherwise the last level grows or shrinks, and levels that are too large go.
    """
    default = default_cluster(cluster.chip, cluster.per_node, cluster.nodes)
    resized = default_cluster(cluster.chip, cluster.per_node, nodes)
    levels = resized.levels
    if cluster.levels != default.levels:
        if resized.devices > cluster.per_node and cluster.levels[-1].devices <= cluster.per_node:
            raise UsageError(
                f"{cluster.name} has one node and no level between nodes",
                hint="add a [[level]] that joins nodes to the cluster file, or sweep from --on",
            )
        below = tuple(level for level in cluster.levels[:-1] if level.devices < resized.devices)
        levels = (*below, replace(cluster.levels[-1], devices=resized.devices))
    name = resized.name if cluster.name == default.name else f"{cluster.name} with {plural(nodes, 'node')}"
    return replace(cluster, name=name, nodes=nodes, levels=levels)


def sweep(
    cluster: Cluster,
    nodes: Sequence[int],
    make: Callable[[Cluster], Plan],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ScalingPoint, ...]:
    """Call `make` for each number of nodes; a UsageError becomes the reason."""
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
    """Tokens per second and device, relative to the first point with a plan."""
    first = next((candidate.plan for candidate in points if candidate.plan is not None), None)
    if first is None or point.plan is None:
        return None
    return point.plan.best.estimate.tokens_s_per_device / first.best.estimate.tokens_s_per_device
