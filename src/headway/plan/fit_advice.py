"""What makes a model fit in memory, cheapest first: settings, then meshes of the same devices, then more devices.

Shorter sequences, which change what is trained, are the last resort: without context parallelism no number of devices
helps a sequence that is too long for one. Only what the trainer runs is suggested, and only what the memory model says
fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from headway.hardware import Cluster
from headway.plan.candidates import candidates, held_microbatches
from headway.plan.checks import divisors
from headway.plan.memory import PeakMemory, memory
from headway.plan.settings import Mesh, Software
from headway.plan.task import SearchSpace, TrainingTask, trainer_limits

GIB = 2**30
MOST_PROBES = 64
MOST_CHANGES = 3
"""Changes in a hint."""


@dataclass(frozen=True)
class Change:
    """What to change so that a task fits."""

    settings: tuple[str, ...] = ()
    """Recipe keys, as for --set."""
    mesh: Mesh | None = None
    """As for --mesh; None if the mesh stays as it is."""
    nodes: int | None = None
    """Number of nodes, if more are needed."""
    total_bytes: float = 0.0
    """Memory per device after the change."""

    @property
    def options(self) -> str:
        """The settings and the mesh, as people type them."""
        sizes = {} if self.mesh is None else {axis: size for axis, size in asdict(self.mesh).items() if size > 1}
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        return " and ".join([*self.settings, *([f"--mesh {mesh or 'shard=1'}"] if self.mesh is not None else [])])


@dataclass(frozen=True)
class FitAdvice:
    """The memory of a task, and the changes that make it fit."""

    smallest: PeakMemory | None
    """The least that any settings need; None if none are valid."""
    changes: tuple[Change, ...]
    cluster: Cluster

    @property
    def sentence(self) -> str:
        """For people."""
        if self.smallest is None:
            need = "no settings in the search space are valid"
        else:
            need = f"needs {_gb(self.smallest.total)} of {_gb(self.smallest.capacity)} per device"
        if self.smallest is not None and self.smallest.fits:
            return f"it fits: {need}"
        if not self.changes:
            return f"{need}; no setting, mesh or number of nodes that was tried makes it fit"
        return f"{need}; it fits {', or '.join(map(self._text, self.changes))}"

    def _text(self, change: Change) -> str:
        unit = "nodes" if self.cluster.per_node > 1 else "devices"
        place = "" if change.nodes is None else f"on {change.nodes} {unit} instead of {self.cluster.nodes}"
        options = f"with {change.options}" if change.options else ""
        return f"{' '.join(filter(None, (place, options)))} ({_gb(change.total_bytes)})"


States = Sequence[tuple[tuple[str, ...], Software]]
"""Settings that make the optimizer's states smaller, and the trainer's software with each."""


def smallest_change(task: TrainingTask, cluster: Cluster, choices: SearchSpace, states: States = ()) -> FitAdvice:
    """For a task that does not fit: its memory, and up to three changes that make it fit, cheapest first."""
    choices = _runnable(task, choices)
    smallest = _smallest_peak(task, cluster, choices)
    if smallest is not None and smallest.fits:
        return FitAdvice(smallest, (), cluster)
    changes: list[Change] = []
    for change, changed, space in _single_changes(task, cluster, choices, states):
        is_known = any(_kind(change) == _kind(other) for other in changes)
        peak = None if is_known else _smallest_peak(changed, cluster, space)
        if peak is not None and peak.fits:
            changes.append(replace(change, total_bytes=peak.total))
        if len(changes) == MOST_CHANGES:
            return FitAdvice(smallest, tuple(changes), cluster)
    if not changes:
        changes += _combined(task, cluster, choices, states)
    changes += _more_nodes(task, cluster, choices)
    return FitAdvice(smallest, tuple(changes or _shorter_sequences(task, cluster, choices)), cluster)


def _kind(change: Change) -> tuple[str, ...]:
    """What a change is about: passes, recomputation, optimizer states, or the axes of a mesh."""
    if change.mesh is not None:
        return tuple(axis for axis, size in asdict(change.mesh).items() if size > 1)
    key = change.settings[0].partition("=")[0]
    return (key if key in ("train.microbatch", "train.recompute") else "states",)


def _runnable(task: TrainingTask, choices: SearchSpace) -> SearchSpace:
    """The part of a search space that the trainer runs."""
    limits = choices.limits or trainer_limits(task.architecture)
    most_tensor = choices.max_tensor if "tensor" in limits.axes else 1
    return replace(choices, limits=limits, max_tensor=most_tensor, context=False)


Step = tuple[Change, TrainingTask, SearchSpace]


def _single_changes(task: TrainingTask, cluster: Cluster, choices: SearchSpace, states: States) -> Iterator[Step]:
    """Untried changes on the same devices, cheapest first."""
    yield from _smaller_microbatches(task, choices)
    yield from _pass_changes(task, choices)
    for settings, software in states:
        yield Change(settings), replace(task, software=software), choices
    for mesh in _meshes(task, cluster, choices.mesh):
        yield Change(mesh=mesh), task, replace(choices, mesh=mesh)


def _smaller_microbatches(task: TrainingTask, choices: SearchSpace) -> Iterator[Step]:
    """Divisors of a stated microbatch, the largest first: the less it shrinks, the less speed it costs."""
    if choices.microbatches is not None:
        stated = min(choices.microbatches)
        for microbatch in reversed(divisors(stated, stated - 1)):
            change = Change((f"train.microbatch={microbatch}",))
            yield change, task, replace(choices, microbatches=(microbatch,))


def _pass_changes(task: TrainingTask, choices: SearchSpace) -> Iterator[Step]:
    """The smallest passes, and recomputation, if the recipe states otherwise."""
    if choices.microbatches is not None and min(choices.microbatches) > 1:
        yield Change(("train.microbatch=1",)), task, replace(choices, microbatches=(1,))
    if "full" not in choices.recompute or choices.blocks is not None:
        unset = () if choices.blocks is None else ("train.recompute_blocks=",)
        yield Change(("train.recompute=full", *unset)), task, replace(choices, recompute=("full",), blocks=None)


def _meshes(task: TrainingTask, cluster: Cluster, stated: Mesh | None) -> Iterator[Mesh]:
    """Other meshes than a stated one: all data ranks as shards, then more tensor and more pipeline ranks."""
    if stated is None:
        return
    arch = task.architecture
    mesh = Mesh(1, stated.data * stated.context, stated.tensor, stated.pipeline)
    if mesh.shard > stated.shard:
        yield mesh
    most_tensor = 1 if arch.experts or arch.latent else cluster.per_node
    for tensor in divisors(cluster.devices // mesh.pipeline, most_tensor):
        if tensor > mesh.tensor:
            yield replace(mesh, shard=cluster.devices // (tensor * mesh.pipeline), tensor=tensor)
    for pipeline in divisors(cluster.devices // mesh.tensor, arch.layers):
        if pipeline > mesh.pipeline:
            yield replace(mesh, shard=cluster.devices // (pipeline * mesh.tensor), pipeline=pipeline)


def _combined(task: TrainingTask, cluster: Cluster, choices: SearchSpace, states: States) -> list[Change]:
    """The fewest changes that fit together, each added to those before it; none if all of them do not suffice."""
    total = Change()
    # the smallest states come last
    changes = [*(change for change, _, _ in _pass_changes(task, choices)), *(Change(keys) for keys, _ in states[-1:])]
    for number, change in enumerate(changes):
        total = replace(total, settings=(*total.settings, *change.settings))
        if change.settings == (states[-1][0] if states else None):
            task = replace(task, software=states[-1][1])
        else:
            choices = next(space for other, _, space in _pass_changes(task, choices) if other == change)
        peak = _smallest_peak(task, cluster, choices) if number else None  # the first alone was tried
        if peak is not None and peak.fits:
            return [replace(total, total_bytes=peak.total)]
    for mesh in _meshes(task, cluster, choices.mesh):
        peak = _smallest_peak(task, cluster, replace(choices, mesh=mesh))
        if peak is not None and peak.fits:
            return [replace(total, mesh=mesh, total_bytes=peak.total)]
    return []


def _more_nodes(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> list[Change]:
    """The smallest number of nodes that fits, if any; a stated mesh grows along its shard axis."""

    def grown(nodes: int) -> Mesh | None:
        mesh = choices.mesh
        return mesh and replace(mesh, shard=mesh.shard * nodes // cluster.nodes)

    def fits(nodes: int) -> PeakMemory | None:
        peak = _smallest_peak(task, replace(cluster, nodes=nodes), replace(choices, mesh=grown(nodes)))
        return peak if peak is not None and peak.fits else None

    low, high = cluster.nodes, 2 * cluster.nodes
    while fits(high) is None:
        low, high = high, 2 * high
        if high > 2**8 * cluster.nodes:
            return []
    # not every count divides the batch, so that bisection could miss the smallest
    counts = [*range(low + 1, high, max(1, (high - low) // MOST_PROBES)), high]
    nodes, peak = next((nodes, peak) for nodes in counts if (peak := fits(nodes)) is not None)
    return [Change(mesh=grown(nodes), nodes=nodes, total_bytes=peak.total)]


def _shorter_sequences(task: TrainingTask, cluster: Cluster, choices: SearchSpace) -> list[Change]:
    """The longest half, quarter and so on of the sequences that fits, if any."""
    seq = task.seq // 2
    while seq > 0:
        peak = _smallest_peak(replace(task, seq=seq), cluster, choices)
        if peak is not None and peak.fits:
            return [Change((f"data.seq={seq}",), total_bytes=peak.total)]
        seq //= 2
    return []


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
