"""Validates settings against a model and a cluster, with the conflicting numbers and a hint.

All rules are in `_conflicts`: `check` raises the first conflict, `valid` only tests for one.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import gcd, isqrt

from headway.errors import UsageError, plural
from headway.hardware import Cluster
from headway.plan.architecture import Architecture
from headway.plan.context import heads_divide
from headway.plan.pipeline import check_schedule
from headway.plan.settings import Mesh, Settings

Conflict = tuple[str, str | None]


def check(arch: Architecture, settings: Settings, cluster: Cluster) -> None:
    """Raise UsageError with the conflicting numbers and a hint if the settings cannot run on the cluster."""
    for message, hint in _conflicts(arch, settings, cluster):
        raise UsageError(message, hint=hint)


def valid(arch: Architecture, settings: Settings, cluster: Cluster) -> bool:
    """Whether the settings can run on the cluster, memory aside."""
    return next(_conflicts(arch, settings, cluster), None) is None


def _conflicts(arch: Architecture, settings: Settings, cluster: Cluster) -> Iterator[Conflict]:
    mesh = settings.mesh
    if mesh.devices != cluster.devices:
        yield _devices(mesh, cluster)
    if arch.diffusion is not None and mesh.pipeline > 1:
        yield (
            f"pipeline {mesh.pipeline}: diffusion transformers have no pipeline axis",
            "use replicate, shard or tensor",
        )
    if mesh.tensor > 1:
        yield from _tensor(arch, settings)
    if mesh.context > 1:
        yield from _context(arch, settings)
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


def _devices(mesh: Mesh, cluster: Cluster) -> Conflict:
    others = mesh.devices // mesh.shard
    hint = f"the axes other than expert must multiply to {cluster.devices}"
    if cluster.devices % others == 0:
        hint = f"shard={cluster.devices // others} uses all of them"
    return f"the mesh {mesh.describe()} takes {mesh.devices} devices, {cluster.name} has {cluster.devices}", hint


def _tensor(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    """The tensor axis splits heads, feed-forwards and the residual stream."""
    size, tokens = settings.mesh.tensor, settings.seq // settings.mesh.context
    for message in _heads(arch, size):
        sizes = [str(n) for n in divisors(arch.heads) if not list(_heads(arch, n))]
        yield message, f"tensor may be {', '.join(sizes)}"
    if settings.software.sequence_parallel and arch.diffusion is None and tokens % size:
        shared = f"sequences of {settings.seq} tokens" + (
            f" over context {settings.mesh.context}" if tokens != settings.seq else ""
        )
        yield f"tensor {size} does not divide {shared}", _nearest(settings.seq, size * settings.mesh.context)


def _heads(arch: Architecture, size: int) -> Iterator[str]:
    if arch.heads % size:
        yield f"tensor {size} does not divide {arch.heads} heads"
    if arch.latent is None and arch.kv_heads % size and size % arch.kv_heads:
        yield f"tensor {size} is neither a divisor nor a multiple of {arch.kv_heads} key-value heads"
    experts = arch.experts
    widths = [arch.hidden] if experts is None or experts.dense_layers else []
    widths += [experts.hidden * experts.shared] if experts is not None else []
    for width in widths:
        if width % size:
            yield f"tensor {size} does not divide a feed-forward of {width}"


def _context(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    """The context axis splits sequences: under Headway's trainer into two chunks per worker."""
    size, seq, chunks = settings.mesh.context, settings.seq, settings.mesh.context
    if settings.software.is_headway:
        if arch.diffusion is not None:
            yield f"context {size}: diffusion transformers have no context axis", "use replicate, shard or tensor"
            return
        chunks = 2 * size
    if seq % chunks:
        parts = f" into {chunks} chunks, two per worker" if chunks > size else ""
        yield f"context {size} does not divide sequences of {seq} tokens{parts}", _nearest(seq, chunks)
    if settings.context_attention == "all-to-all" and not heads_divide(arch, settings):
        tensor = settings.mesh.tensor
        share = f" over tensor {tensor}" if tensor > 1 else ""
        sizes = ", ".join(str(n) for n in divisors(gcd(arch.heads, arch.kv_heads) // gcd(tensor, arch.kv_heads)))
        yield (
            f"all-to-all over context {size} does not divide {arch.heads} heads and {arch.kv_heads} key-value "
            f"heads{share}",
            f"context may be {sizes}; or use all-gather",
        )


def _experts(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    mesh, size = settings.mesh, settings.mesh.expert
    if arch.experts is None:
        yield f"expert {size}: the model has no experts", "leave expert at 1"
        return
    if arch.experts.count % size:
        shared = gcd(arch.experts.count, mesh.owners) if settings.software.is_headway else arch.experts.count
        sizes = ", ".join(map(str, divisors(shared)))
        yield f"expert {size} does not divide {arch.experts.count} experts", f"expert may be {sizes}"
    if settings.software.is_headway:
        yield from _sharded_experts(arch, settings)
        return
    sharded = settings.zero > 0
    across = (mesh.shard if sharded else mesh.data) * mesh.context * mesh.tensor
    if across % size:
        data = f"shard {mesh.shard}" if sharded else f"{mesh.data} data ranks"
        sizes = ", ".join(map(str, divisors(across, arch.experts.count)))
        yield (
            f"expert {size} does not divide {across} devices ({data} x context {mesh.context} x tensor {mesh.tensor})",
            f"expert may be {sizes}",
        )


def _sharded_experts(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    """What Headway's trainer needs: an axis within shard, whose parts share out experts evenly, or each expert."""
    mesh, experts, size = settings.mesh, arch.experts, settings.mesh.expert
    shard, sharing = mesh.owners, f"shard {mesh.shard}" + (f" x context {mesh.context}" if mesh.context > 1 else "")
    assert experts is not None, "a dense model has no experts"
    if shard % size:
        sizes = ", ".join(map(str, divisors(shard, experts.count)))
        more = f"; or use a shard axis of {size}" if mesh.context == 1 else ""
        yield f"expert {size} does not divide {sharing}, which it is a part of", f"expert may be {sizes}{more}"
        return
    own, sharers = experts.count // size, shard // size
    if own % sharers and (experts.hidden % sharers or arch.dim % sharers):
        yield (
            f"expert {size} leaves {own} experts to each {sharers} workers, which divide neither them nor their sizes "
            f"({arch.dim}, {experts.hidden})",
            f"use a shard axis of {size} to {size * own} workers that divide them, and replicate 2 or more",
        )


def _microbatch(settings: Settings) -> Conflict:
    share, size = settings.batch // settings.mesh.data, settings.microbatch
    below = [n for n in divisors(share) if n < size][-1:]
    above = [n for n in divisors(share) if n > size][:1]
    message = f"a microbatch of {size} does not divide the {share} sequences of each of {settings.mesh.data} data ranks"
    return message, f"the nearest that do: {_either(below + above)}"


def _pipeline(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    ranks = settings.mesh.pipeline
    if ranks == 1 and (settings.schedule != "1f1b" or settings.chunks > 1):
        yield (
            f"{settings.schedule} with {settings.chunks} chunks needs a pipeline, but pipeline is 1",
            "use 1f1b with one chunk",
        )
        return
    if settings.stages is not None:
        yield from _stages(arch, settings)
    try:
        check_schedule(settings.schedule, ranks, settings.chunks, settings.microbatches, arch.layers)
    except UsageError as error:
        yield error.message, error.hint


def _stages(arch: Architecture, settings: Settings) -> Iterator[Conflict]:
    counts, expected = settings.stages or (), settings.mesh.pipeline * settings.chunks
    stated = f"stages of {', '.join(map(str, counts))} layers"
    if len(counts) != expected:
        axes = f"pipeline {settings.mesh.pipeline}" + (f" x {settings.chunks} chunks" if settings.chunks > 1 else "")
        yield f"{stated} are {len(counts)} stages, but {axes} is {expected}", f"give {expected} numbers, or none"
    elif sum(counts) != arch.layers:
        message = f"{stated} are {plural(sum(counts), 'layer')}, but the model has {arch.layers}"
        yield message, f"they must sum to {arch.layers}"


def _nearest(number: int, divisor: int) -> str:
    """A hint with the multiples below and above."""
    below = number // divisor * divisor
    return f"the nearest that do: {_either([n for n in (below, below + divisor) if n])}"


def _either(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


@lru_cache(maxsize=4096)
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Divisors of a number up to `most`, in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    factors = sorted({*small, *(number // n for n in small)})
    return tuple(n for n in factors if most is None or n <= most)
