"""Suggests the smallest changes that make a model fit in memory."""

from collections.abc import Iterator
from dataclasses import replace

from headway.hardware import Cluster
from headway.plan.candidates import candidates, held_microbatches
from headway.plan.memory import PeakMemory, memory
from headway.plan.task import SearchSpace, TrainingTask

GIB = 2**30
MOST_PROBES = 64


def smallest_change(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> str:
    """For a task that does not fit: its memory, and up to two changes that make it fit, least intrusive first.

    Suggestions respect the limits of the search space.
    """
    if choices.max_tensor is None:
        choices = replace(choices, max_tensor=cluster.devices)
    smallest = _smallest_peak(task, cluster, choices)
    need = (
        "no settings in the search space are valid"
        if smallest is None
        else f"needs {_gb(smallest.total)} of {_gb(smallest.capacity)} per device"
    )
    if smallest is not None and smallest.fits:
        return f"it fits: {need}"
    fixes: list[str] = []
    for name, changed, space in _remedies(task, choices):
        peak = _smallest_peak(changed, cluster, space)
        if peak is not None and peak.fits and len(fixes) < 2:
            fixes.append(f"{name} ({_gb(peak.total)})")
    if len(fixes) < 2:
        fixes += _more_nodes(task, cluster, choices)
    return f"{need}; it fits {', or '.join(fixes)}" if fixes else f"{need}; {_combined(task, cluster, choices)}"


def _remedies(task: TrainingTask, choices: SearchSpace) -> Iterator[tuple[str, TrainingTask, SearchSpace]]:
    """Untried changes on the same devices, least intrusive first."""
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
    """The smallest number of nodes that fits, if any; a fixed mesh grows along its shard axis."""

    def fits(nodes: int) -> PeakMemory | None:
        larger, mesh = replace(cluster, nodes=nodes), choices.mesh
        if mesh is not None:
            mesh = replace(mesh, shard=mesh.shard * nodes // cluster.nodes)
        peak = _smallest_peak(task, larger, replace(choices, mesh=mesh))
        return peak if peak is not None and peak.fits else None

    low, high = cluster.nodes, 2 * cluster.nodes
    while fits(high) is None:
        low, high = high, 2 * high
        if high > 2**8 * cluster.nodes:
            return []
    # not every count divides the batch, so that bisection could miss the smallest
    counts = [*range(low + 1, high, max(1, (high - low) // MOST_PROBES)), high]
    nodes, peak = next((nodes, peak) for nodes in counts if (peak := fits(nodes)) is not None)
    unit = "nodes" if cluster.per_node > 1 else "devices"
    return [f"on {nodes} {unit} instead of {cluster.nodes} ({_gb(peak.total)})"]


def _combined(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> str:
    """Whether all changes together make it fit, at the same sequence length."""
    names: list[str] = []
    while remaining := [remedy for remedy in _remedies(task, choices) if remedy[1].seq == task.seq]:
        name, task, choices = remaining[0]
        names.append(name.removeprefix("with "))
    smallest = _smallest_peak(task, cluster, choices)
    if not names or smallest is None:
        return "no single change makes it fit"
    verdict = "it fits" if smallest.fits else "it still does not fit"
    return f"no single change makes it fit; with {' and '.join(names)} it needs {_gb(smallest.total)}: {verdict}"


def _smallest_peak(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> PeakMemory | None:
    """The least memory that any candidate needs; None if no candidate is valid."""
    saving = tuple(kind for kind in ("full", "selective", "none") if kind in choices.recompute)[:1] or choices.recompute
    choices = replace(choices, recompute=saving, schedules=("1f1b",))
    settings = candidates(task, cluster, choices, context=choices.context is not False)
    peaks = (memory(task.architecture, candidate, cluster, held_microbatches(candidate)) for candidate in settings)
    return min(peaks, key=lambda peak: peak.total, default=None)


def _gb(size: float) -> str:
    """In units of 2**30 bytes, like the "80 GB" of data sheets."""
    return f"{size / GIB:.1f} GB"
