"""For a model that fits nowhere: the smallest change that would make it fit."""

from collections.abc import Iterator
from dataclasses import replace

from headway.hardware import Cluster
from headway.plan.candidates import candidates, held_microbatches
from headway.plan.memory import PeakMemory, memory
from headway.plan.task import SearchSpace, TrainingTask

__all__ = ["smallest_change"]

GIB = 2**30
MOST_PROBES = 64


def smallest_change(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> str:
    """For a task that fits nowhere: what it needs, and up to two changes that make it fit, the least intrusive first.

    Nothing is proposed that the choices' limits rule out.
    """
    if choices.max_tensor is None:
        choices = replace(choices, max_tensor=cluster.devices)
    least = _least(task, cluster, choices)
    need = (
        "nothing that may vary can run"
        if least is None
        else f"needs {_gb(least.total)} of {_gb(least.capacity)} a device"
    )
    if least is not None and least.fits:
        return f"it fits: {need}"
    found: list[str] = []
    for name, changed, more in _remedies(task, choices):
        left = _least(changed, cluster, more)
        if left is not None and left.fits and len(found) < 2:
            found.append(f"{name} ({_gb(left.total)})")
    if len(found) < 2:
        found += _more_nodes(task, cluster, choices)
    return f"{need}; it fits {', or '.join(found)}" if found else f"{need}; {_all_at_once(task, cluster, choices)}"


def _remedies(task: TrainingTask, choices: SearchSpace) -> Iterator[tuple[str, TrainingTask, SearchSpace]]:
    """Changes on the same devices, the least intrusive first; those that were tried already are left out."""
    if "full" not in choices.recompute:
        yield "with full recomputation", task, replace(choices, recompute=("full",))
    if choices.microbatches is not None and min(choices.microbatches) > 1:
        yield "with a microbatch of 1", task, replace(choices, microbatches=(1,))
    if choices.mesh is not None or 3 not in choices.zero:
        yield "with more sharding", task, replace(choices, mesh=None, zero=(3,))
    if min(choices.moment_bytes or (task.software.moment_bytes,)) > 2 and task.software.states is None:
        yield "with bf16 moments", task, replace(choices, moment_bytes=(2,))
    if task.seq > 1:
        yield f"with sequences of {task.seq // 2}", replace(task, seq=task.seq // 2), choices


def _more_nodes(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> list[str]:
    """The smallest number of nodes that fits, if one does; a fixed mesh grows along its shard axis."""

    def fits(nodes: int) -> PeakMemory | None:
        larger, mesh = replace(cluster, nodes=nodes), choices.mesh
        if mesh is not None:
            mesh = replace(mesh, shard=mesh.shard * nodes // cluster.nodes)
        left = _least(task, larger, replace(choices, mesh=mesh))
        return left if left is not None and left.fits else None

    low, high = cluster.nodes, 2 * cluster.nodes
    while fits(high) is None:
        low, high = high, 2 * high
        if high > 2**8 * cluster.nodes:
            return []
    # many counts cannot share the batch, so that halving the range could miss the smallest that can
    between = [*range(low + 1, high, max(1, (high - low) // MOST_PROBES)), high]
    nodes, left = next((nodes, left) for nodes in between if (left := fits(nodes)) is not None)
    unit = "nodes" if cluster.per_node > 1 else "devices"
    return [f"on {nodes} {unit} instead of {cluster.nodes} ({_gb(left.total)})"]


def _all_at_once(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> str:
    """Where no single change is enough: whether all of them are, on the same sequences."""
    names: list[str] = []
    while rest := [remedy for remedy in _remedies(task, choices) if remedy[1].seq == task.seq]:
        name, task, choices = rest[0]
        names.append(name.removeprefix("with "))
    least = _least(task, cluster, choices)
    if not names or least is None:
        return "no single change makes it fit"
    verdict = "it fits" if least.fits else "it still does not fit"
    return f"no single change makes it fit; with {' and '.join(names)} it needs {_gb(least.total)}: {verdict}"


def _least(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> PeakMemory | None:
    """The least memory that any way to run needs; None where nothing is valid."""
    saving = tuple(kind for kind in ("full", "selective", "none") if kind in choices.recompute)[:1] or choices.recompute
    choices = replace(choices, recompute=saving, schedules=("1f1b",))
    ways = candidates(task, cluster, choices, context=choices.context is not False)
    needs = (memory(task.architecture, way, cluster, held_microbatches(way)) for way in ways)
    return min(needs, key=lambda need: need.total, default=None)


def _gb(size: float) -> str:
    """As data sheets say it, whose "80 GB" are 2**30 bytes each."""
    return f"{size / GIB:.1f} GB"
