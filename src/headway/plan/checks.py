"""What can be asked of a planner: the task, what may vary, which ways to run there are, and what is wrong with others.

Rules stand in one place, `_clashes`: `check` raises the first of them as a sentence, `valid` only asks whether there is
one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import isqrt

from headway.errors import UsageError
from headway.hardware import Cluster, precision
from headway.plan.architecture import Architecture
from headway.plan.memory import Memory, memory
from headway.plan.pipeline import check_schedule
from headway.plan.settings import AXES, Mesh, Recompute, Schedule, Settings, Software

__all__ = [
    "RUNNABLE", "Choices", "Limits", "Task", "candidates", "check", "held_microbatches", "smallest_change", "valid",
]  # fmt: skip

LONG = 16 * 1024
"""Tokens of a sequence from which it is worth sharing one among devices."""
LEAST_SHARE = 2048
"""Tokens of a sequence that a device keeps at least when it is shared."""
MOST_TOKENS = 2**18
"""Of a microbatch on a device. Products are at their best from a tenth of that on; the rest is for weights that are
gathered for each microbatch over slow links: at 2**18 tokens an H100 computes for longer than 25 Gbit/s gather."""
MOST_TOKENS_IN_PIPELINE = 2**16
"""The same where weights stay, and larger microbatches lengthen the bubble."""
MOST_CHUNKS = 8
GIB = 2**30


@dataclass(frozen=True)
class Task:
    """What is to be trained, whatever the way."""

    architecture: Architecture
    seq: int
    batch: int
    """Sequences in one step, over all devices."""
    software: Software = field(default_factory=Software)
    precision: str = "bf16"
    keeps_weights: bool = False
    frozen: bool = False
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""


@dataclass(frozen=True)
class Limits:
    """What a trainer can run."""

    axes: tuple[str, ...] = AXES
    """Of the mesh, that may be larger than 1."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    """On one device there is nothing to spread, and any is right."""
    recompute: tuple[Recompute, ...] = ("none", "attention", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    precisions: tuple[str, ...] | None = None
    """By any of their names; None is all."""
    moment_bytes: tuple[float, ...] | None = None
    """Of each of Adam's two moments; None is any."""

    def allows(self, settings: Settings) -> bool:
        """Whether the trainer runs it."""
        return (
            settings.recompute in self.recompute
            and settings.schedule in self.schedules
            and self.allows_mesh(settings.mesh, settings.zero)
            and (self.precisions is None or precision(settings.precision) in map(precision, self.precisions))
            and (self.moment_bytes is None or settings.software.moment_bytes in self.moment_bytes)
        )

    def allows_mesh(self, mesh: Mesh, zero: int) -> bool:
        """Whether it runs on such a mesh."""
        return (mesh.devices == 1 or zero in self.zero) and all(
            getattr(mesh, axis) == 1 or axis in self.axes for axis in AXES
        )


RUNNABLE = Limits(
    axes=("shard",),
    zero=(3,),
    recompute=("none", "full"),
    schedules=("1f1b",),
    precisions=("bf16", "fp32"),
    moment_bytes=(4,),
)
"""What this version's trainer runs."""


@dataclass(frozen=True)
class Choices:
    """What a search may vary; None leaves it to the search, which then tries all that is sensible."""

    mesh: Mesh | None = None
    """The one to use; otherwise all whose sizes divide what they share."""
    microbatches: tuple[int, ...] | None = None
    """Sequences in one pass; otherwise all that divide a data rank's share of the batch, up to MOST_TOKENS."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble")
    chunks: tuple[int, ...] | None = None
    """Of an interleaved pipeline; otherwise 2 to 8 that give all stages as many layers, or 2."""
    precisions: tuple[str, ...] | None = None
    """Otherwise the task's: another one trains another model."""
    moment_bytes: tuple[float, ...] | None = None
    """Otherwise the software's, for the same reason."""
    zero: tuple[int, ...] = (0, 1, 3)
    max_tensor: int | None = None
    """Otherwise as many devices as the fastest links join."""
    context: bool | None = None
    """Whether to share sequences among devices; otherwise long ones, and any where nothing else fits."""
    limits: Limits | None = None
    """What the trainer can run, where only that counts."""


# -- the ways to run there are


def candidates(task: Task, cluster: Cluster, choices: Choices, context: bool = False) -> Iterator[Settings]:
    """Every valid way to run that the choices leave, sequences shared only with `context`.

    Meshes that can win nothing are left out. Copies of the whole exist without sharding (`zero` 0), and with sharded
    weights and no pipeline, where they keep gathers near; otherwise what is sharded is sharded over all data ranks.
    """
    for mesh, zero in _meshes(task, cluster, choices, context):
        if choices.limits is not None and not choices.limits.allows_mesh(mesh, zero):
            continue
        if valid(task.architecture, settings_of(task, mesh, zero), cluster):
            yield from _variants(task, cluster, choices, mesh, zero)


def settings_of(task: Task, mesh: Mesh, zero: int, microbatch: int = 1) -> Settings:
    """The plainest way to run a task on a mesh."""
    return Settings(
        mesh, task.seq, microbatch, task.batch, zero, precision=task.precision, software=task.software,
        keeps_weights=task.keeps_weights, frozen=task.frozen, imbalance=task.imbalance,
    )  # fmt: skip


def _variants(task: Task, cluster: Cluster, choices: Choices, mesh: Mesh, zero: int) -> Iterator[Settings]:
    """One mesh with every microbatch, schedule, recomputation and precision."""
    arch, limits = task.architecture, choices.limits
    sizes = choices.microbatches or _sizes(task, mesh)
    moments = choices.moment_bytes or (task.software.moment_bytes,)
    rest = list(product(
        choices.recompute, choices.precisions or (task.precision,),
        [replace(task.software, moment_bytes=size) for size in moments],
    ))  # fmt: skip
    for size, (schedule, chunks) in product(sizes, list(_orders(arch, choices, mesh.pipeline))):
        for i, (recompute, kind, software) in enumerate(rest):
            made = Settings(
                mesh, task.seq, size, task.batch, zero, recompute, schedule, chunks, kind, software,
                keeps_weights=task.keeps_weights, frozen=task.frozen, imbalance=task.imbalance,
            )  # fmt: skip
            if i == 0 and not valid(arch, made, cluster):
                break
            if limits is None or limits.allows(made):
                yield made


def _sizes(task: Task, mesh: Mesh) -> tuple[int, ...]:
    """Microbatches that divide a data rank's share, up to where larger ones bring no more."""
    most = MOST_TOKENS_IN_PIPELINE if mesh.pipeline > 1 else MOST_TOKENS
    return divisors(task.batch // mesh.data, max(1, most * mesh.context // task.seq))


def _orders(arch: Architecture, choices: Choices, pipeline: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules with their chunks; without a pipeline there is one."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for schedule in choices.schedules:
        if schedule != "interleaved":
            yield schedule, 1
            continue
        for chunks in choices.chunks or _even_chunks(arch.layers, pipeline):
            yield schedule, chunks


def _even_chunks(layers: int, pipeline: int) -> tuple[int, ...]:
    """Chunks that give each stage as many layers, the ends of the model counted as one or not."""
    fit = [n for n in range(2, MOST_CHUNKS + 1) if n * pipeline <= layers]
    return tuple(n for n in fit if layers % (n * pipeline) == 0 or (layers + 2) % (n * pipeline) == 0) or tuple(fit[:1])


def _meshes(task: Task, cluster: Cluster, choices: Choices, context: bool) -> Iterator[tuple[Mesh, int]]:
    if choices.mesh is not None:
        for zero in _zeros(task.architecture, choices.mesh, choices.mesh.shard, choices.zero):
            yield choices.mesh, zero
        return
    axes = choices.limits.axes if choices.limits is not None else AXES
    arch, near = task.architecture, cluster.levels[0].devices if cluster.levels else 1
    most_tensor = (choices.max_tensor or near) if "tensor" in axes else 1
    most_stages = arch.layers if "pipeline" in axes else 1
    most_context = max(1, task.seq // LEAST_SHARE) if context and "context" in axes else 1
    for tensor in divisors(cluster.devices, most_tensor):
        for pipeline in divisors(cluster.devices // tensor, most_stages):
            left = cluster.devices // (tensor * pipeline)
            for shared in divisors(left, most_context):
                if task.batch % (left // shared) == 0:
                    whole = Mesh(left // shared, 1, tensor, pipeline, shared)
                    yield from _spread(arch, whole, choices.zero)


def _spread(arch: Architecture, whole: Mesh, zeros: tuple[int, ...]) -> Iterator[tuple[Mesh, int]]:
    """A mesh's data axis as copies and shards, and its experts, by what is sharded."""
    data = whole.data
    for zero in _zeros(arch, whole, data, zeros):
        shards = divisors(data) if zero == 3 and whole.pipeline == 1 else (data,)
        for shard in shards if zero else (1,):
            if zero and shard * whole.context == 1 < data:
                continue
            across = (shard if zero else data) * whole.context * whole.tensor
            for expert in divisors(across, arch.experts.count) if arch.experts else (1,):
                yield replace(whole, replicate=data // shard, shard=shard, expert=expert), zero


def _zeros(arch: Architecture, mesh: Mesh, shard: int, zeros: tuple[int, ...]) -> tuple[int, ...]:
    """What may be sharded: all the same where nobody shares. Experts are not split: the tensor axis shares them."""
    sharers = shard * mesh.context * (mesh.tensor if arch.experts else 1)
    return (min(zeros),) if sharers == 1 else zeros


@lru_cache(maxsize=4096)
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Every whole number up to `most` that divides it, from the smallest."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    both = sorted({*small, *(number // n for n in small)})
    return tuple(n for n in both if most is None or n <= most)


def held_microbatches(settings: Settings) -> float:
    """Microbatches whose activations the first pipeline stage holds at most, all its chunks together."""
    ranks, chunks, count = settings.mesh.pipeline, settings.chunks, settings.microbatches
    if ranks == 1:
        return 1.0
    if settings.schedule == "interleaved":
        return min(2 * (ranks - 1) + (chunks - 1) * ranks + 1, count * chunks) / chunks
    return min(ranks, count)


# -- what is wrong with others

Clash = tuple[str, str | None]


def check(arch: Architecture, settings: Settings, cluster: Cluster) -> None:
    """Raise UsageError, with the numbers that clash and a hint, where the settings cannot run on the cluster."""
    for message, hint in _clashes(arch, settings, cluster):
        raise UsageError(message, hint=hint)


def valid(arch: Architecture, settings: Settings, cluster: Cluster) -> bool:
    """Whether the settings can run on the cluster, memory aside."""
    return next(_clashes(arch, settings, cluster), None) is None


def _clashes(arch: Architecture, settings: Settings, cluster: Cluster) -> Iterator[Clash]:
    mesh = settings.mesh
    if mesh.devices != cluster.devices:
        yield _devices(mesh, cluster)
    if mesh.tensor > 1:
        yield from _tensor(arch, settings)
    if mesh.context > 1 and settings.seq % mesh.context:
        yield (
            f"context {mesh.context} does not divide sequences of {settings.seq} tokens",
            _nearest(settings.seq, mesh.context),
        )
    if mesh.expert > 1:
        yield from _experts(arch, settings)
    if settings.batch % mesh.data:
        ranks = f"replicate {mesh.replicate} x shard {mesh.shard}"
        yield (
            f"a batch of {settings.batch} does not divide by {mesh.data} data ranks ({ranks})",
            _nearest(settings.batch, mesh.data),
        )
    elif (settings.batch // mesh.data) % settings.microbatch:
        yield _microbatch(settings)
    yield from _pipeline(arch, settings)


def _devices(mesh: Mesh, cluster: Cluster) -> Clash:
    rest = mesh.devices // mesh.shard
    hint = f"its axes, but for expert, must multiply to {cluster.devices}"
    if cluster.devices % rest == 0:
        hint = f"with shard={cluster.devices // rest} it takes all"
    return f"the mesh {mesh.describe()} takes {mesh.devices} devices, {cluster.name} has {cluster.devices}", hint


def _tensor(arch: Architecture, settings: Settings) -> Iterator[Clash]:
    """What the tensor axis splits: heads, feed-forwards, and the stream between them."""
    size, tokens = settings.mesh.tensor, settings.seq // settings.mesh.context
    for message in _heads(arch, size):
        sizes = [str(n) for n in divisors(arch.heads) if not list(_heads(arch, n))]
        yield message, f"tensor may be {', '.join(sizes)}"
    if settings.software.sequence_parallel and tokens % size:
        shared = f"sequences of {settings.seq} tokens" + (
            f" over context {settings.mesh.context}" if tokens != settings.seq else ""
        )
        yield f"tensor {size} does not divide {shared}", _nearest(settings.seq, size * settings.mesh.context)


def _heads(arch: Architecture, size: int) -> Iterator[str]:
    if arch.heads % size:
        yield f"tensor {size} does not divide {arch.heads} heads"
    if arch.latent is None and arch.kv_heads % size and size % arch.kv_heads:
        yield f"tensor {size} is neither a part nor a multiple of {arch.kv_heads} key-value heads"
    experts = arch.experts
    widths = [arch.hidden] if experts is None or experts.dense_layers else []
    widths += [experts.hidden * experts.shared] if experts is not None else []
    for width in widths:
        if width % size:
            yield f"tensor {size} does not divide a feed-forward of {width}"


def _experts(arch: Architecture, settings: Settings) -> Iterator[Clash]:
    mesh, size = settings.mesh, settings.mesh.expert
    if arch.experts is None:
        yield f"expert {size}: the model has no experts", "leave expert at 1"
        return
    if arch.experts.count % size:
        sizes = ", ".join(map(str, divisors(arch.experts.count)))
        yield f"expert {size} does not divide {arch.experts.count} experts", f"expert may be {sizes}"
    sharded = settings.zero > 0
    across = (mesh.shard if sharded else mesh.data) * mesh.context * mesh.tensor
    if across % size:
        data = f"shard {mesh.shard}" if sharded else f"{mesh.data} data ranks"
        sizes = ", ".join(map(str, divisors(across, arch.experts.count)))
        yield (
            f"expert {size} does not divide {across} devices ({data} x context {mesh.context} x tensor {mesh.tensor})",
            f"expert may be {sizes}",
        )


def _microbatch(settings: Settings) -> Clash:
    share, size = settings.batch // settings.mesh.data, settings.microbatch
    below = [n for n in divisors(share) if n < size][-1:]
    above = [n for n in divisors(share) if n > size][:1]
    message = (
        f"a microbatch of {size} does not divide the {share} sequences that each of {settings.mesh.data} data ranks has"
    )
    return message, f"the nearest that do: {_either(below + above)}"


def _pipeline(arch: Architecture, settings: Settings) -> Iterator[Clash]:
    ranks = settings.mesh.pipeline
    if ranks == 1 and (settings.schedule != "1f1b" or settings.chunks > 1):
        yield (
            f"{settings.schedule} with {settings.chunks} chunks orders a pipeline, and pipeline is 1",
            "use 1f1b with one chunk",
        )
        return
    try:
        check_schedule(settings.schedule, ranks, settings.chunks, settings.microbatches, arch.layers)
    except UsageError as error:
        yield error.message, error.hint


def _nearest(number: int, divisor: int) -> str:
    """The multiples below and above as a hint."""
    below = number // divisor * divisor
    return f"the nearest that do: {_either([n for n in (below, below + divisor) if n])}"


def _either(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


# -- models that fit nowhere

MOST_PROBES = 64


def smallest_change(task: Task, cluster: Cluster, choices: Choices) -> str:
    """For a task that fits nowhere: what it needs, and up to two changes that make it fit, the least intrusive first.

    Nothing is proposed that the choices' limits rule out.
    """
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


def _remedies(task: Task, choices: Choices) -> Iterator[tuple[str, Task, Choices]]:
    """Changes on the same devices, the least intrusive first; those that were tried already are left out."""
    if "full" not in choices.recompute:
        yield "with full recomputation", task, replace(choices, recompute=("full",))
    if choices.microbatches is not None and min(choices.microbatches) > 1:
        yield "with a microbatch of 1", task, replace(choices, microbatches=(1,))
    if choices.mesh is not None or 3 not in choices.zero:
        yield "with more sharding", task, replace(choices, mesh=None, zero=(3,))
    if min(choices.moment_bytes or (task.software.moment_bytes,)) > 2:
        yield "with bf16 moments", task, replace(choices, moment_bytes=(2,))
    if task.seq > 1:
        yield f"with sequences of {task.seq // 2}", replace(task, seq=task.seq // 2), choices


def _more_nodes(task: Task, cluster: Cluster, choices: Choices) -> list[str]:
    """The smallest number of nodes that fits, if one does; a fixed mesh grows along its shard axis."""

    def fits(nodes: int) -> Memory | None:
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


def _all_at_once(task: Task, cluster: Cluster, choices: Choices) -> str:
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


def _least(task: Task, cluster: Cluster, choices: Choices) -> Memory | None:
    """The least memory that any way to run needs; None where nothing is valid."""
    saving = tuple(kind for kind in ("full", "selective", "none") if kind in choices.recompute)[:1] or choices.recompute
    choices = replace(choices, recompute=saving, schedules=("1f1b",))
    ways = candidates(task, cluster, choices, context=choices.context is not False)
    needs = (memory(task.architecture, way, cluster, held_microbatches(way)) for way in ways)
    return min(needs, key=lambda need: need.total, default=None)


def _gb(size: float) -> str:
    """As data sheets say it, whose "80 GB" are 2**30 bytes each."""
    return f"{size / GIB:.1f} GB"
