"""Enumerates the meshes and settings that a search tries."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from headway.hardware import Cluster
from headway.plan.architecture import Architecture
from headway.plan.checks import divisors, valid
from headway.plan.pipeline import in_flight
from headway.plan.settings import AXES, Mesh, Schedule, Settings
from headway.plan.task import SearchSpace, TrainingTask

LONG = 16 * 1024
"""Sequence length from which context parallelism, and recomputing all but attention, are worth trying."""
LEAST_SHARE = 2048
"""Fewest tokens of a sequence per device under context parallelism."""
MOST_TOKENS = 2**18
"""Per microbatch and device. GEMMs are efficient from a tenth of that on; more amortizes weights gathered for each
microbatch over slow links: at 2**18 tokens an H100 computes for longer than a gather at 25 Gbit/s takes."""
MOST_TOKENS_IN_PIPELINE = 2**16
"""The same in a pipeline, where weights stay gathered and larger microbatches lengthen the bubble."""
MOST_CHUNKS = 8


def candidates(task: TrainingTask, cluster: Cluster, choices: SearchSpace, context: bool = False) -> Iterator[Settings]:
    """Every valid candidate of the search space, with context parallelism only if `context`.

    Meshes that cannot win are left out: replicas exist without sharding (`zero` 0) and, to keep gathers local, with
    sharded weights and no pipeline; otherwise sharding covers all data ranks.
    """
    for mesh, zero in _meshes(task, cluster, choices, context):
        if choices.limits is not None and not choices.limits.allows_mesh(mesh, zero):
            continue
        if valid(task.architecture, settings_of(task, mesh, zero), cluster):
            yield from _variants(task, cluster, choices, mesh, zero)


def settings_of(task: TrainingTask, mesh: Mesh, zero: int, microbatch: int = 1) -> Settings:
    """The simplest settings of a task on a mesh."""
    software = task.software.on_mesh(mesh, task.batch // (mesh.data * microbatch))
    return Settings(
        mesh, task.seq, microbatch, task.batch, zero, precision=task.precision, software=software,
        keeps_weights=task.keeps_weights, frozen=task.frozen, imbalance=task.imbalance,
    )  # fmt: skip


def _variants(task: TrainingTask, cluster: Cluster, choices: SearchSpace, mesh: Mesh, zero: int) -> Iterator[Settings]:
    """A mesh with every microbatch, schedule, recomputation and precision."""
    arch, limits = task.architecture, choices.limits
    microbatches = choices.microbatches or _microbatch_sizes(task, mesh)
    moments = choices.moment_bytes or (task.software.moment_bytes,)
    gathers = zero == 3 and mesh.owners > 1 and mesh.pipeline == 1
    keep_choices, reduce_choices = (choices.keeps_weights, choices.reduces_each) if gathers else (None, None)
    variants = list(product(
        choices.recompute, choices.precisions or (task.precision,), moments, keep_choices or (task.keeps_weights,),
        reduce_choices or (False,),
    ))  # fmt: skip
    for microbatch, (schedule, chunks) in product(microbatches, list(_schedules(arch, choices, mesh.pipeline))):
        software = task.software.on_mesh(mesh, task.batch // (mesh.data * microbatch))
        for i, (recompute, precision, moment_bytes, keep_weights, reduce_each) in enumerate(variants):
            variant_software = replace(software, moment_bytes=moment_bytes)
            if reduce_each and microbatch == task.batch // mesh.data:
                continue  # with a single microbatch the two are the same
            settings = Settings(
                mesh, task.seq, microbatch, task.batch, zero, recompute, schedule, chunks, precision, variant_software,
                reduces_each=reduce_each, keeps_weights=keep_weights, frozen=task.frozen, imbalance=task.imbalance,
                recompute_blocks=choices.blocks if recompute != "none" else None,
                stages=choices.stages if mesh.pipeline > 1 else None,
            )  # fmt: skip
            if recompute == "except-attention" and len(choices.recompute) > 1 and task.seq < LONG:
                continue
            if i == 0 and not valid(arch, settings, cluster):
                break
            if limits is None or limits.allows(settings):
                yield settings


def _microbatch_sizes(task: TrainingTask, mesh: Mesh) -> tuple[int, ...]:
    """Microbatch sizes that divide a data rank's share of the batch."""
    limit = MOST_TOKENS_IN_PIPELINE if mesh.pipeline > 1 else MOST_TOKENS
    return divisors(task.batch // mesh.data, max(1, limit * mesh.context // task.seq))


def _schedules(arch: Architecture, choices: SearchSpace, pipeline: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules with their number of chunks; a single one without a pipeline."""
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
    """Numbers of chunks that give stages equal layers, with embedding and head counted as layers or not."""
    fit = [n for n in range(2, MOST_CHUNKS + 1) if n * pipeline <= layers]
    return tuple(n for n in fit if layers % (n * pipeline) == 0 or (layers + 2) % (n * pipeline) == 0) or tuple(fit[:1])


def _meshes(task: TrainingTask, cluster: Cluster, choices: SearchSpace, context: bool) -> Iterator[tuple[Mesh, int]]:
    if choices.mesh is not None:
        for zero in _zero_stages(task.architecture, choices.mesh, choices.mesh.shard, choices.zero):
            yield choices.mesh, zero
        return
    axes = choices.limits.axes if choices.limits is not None else AXES
    arch, node_devices = task.architecture, cluster.levels[0].devices if cluster.levels else 1
    most_tensor = (choices.max_tensor or node_devices) if "tensor" in axes else 1
    most_stages = arch.layers if "pipeline" in axes and arch.diffusion is None else 1
    most_context = max(1, task.seq // LEAST_SHARE) if context and "context" in axes else 1
    for tensor in divisors(cluster.devices, most_tensor):
        for pipeline in divisors(cluster.devices // tensor, most_stages):
            remaining = cluster.devices // (tensor * pipeline)
            for context_size in divisors(remaining, most_context):
                if task.batch % (remaining // context_size) == 0:
                    base = Mesh(remaining // context_size, 1, tensor, pipeline, context_size)
                    yield from _split_data_axis(arch, base, choices.zero)


def _split_data_axis(arch: Architecture, base: Mesh, zeros: tuple[int, ...]) -> Iterator[tuple[Mesh, int]]:
    """The data axis split into replicas and shards, and the expert axis, per ZeRO stage."""
    data = base.data
    for zero in _zero_stages(arch, base, data, zeros):
        shards = divisors(data) if zero == 3 and base.pipeline == 1 else (data,)
        for shard in shards if zero else (1,):
            if zero and shard * base.context == 1 < data:
                continue
            across = (shard if zero else data) * base.context * base.tensor
            for expert in divisors(across, arch.experts.count) if arch.experts else (1,):
                yield replace(base, replicate=data // shard, shard=shard, expert=expert), zero


def _zero_stages(arch: Architecture, mesh: Mesh, shard: int, zeros: tuple[int, ...]) -> tuple[int, ...]:
    """ZeRO stages to try: they are equivalent on one rank. The tensor axis shares experts and does not split them."""
    sharers = shard * mesh.context * (mesh.tensor if arch.experts else 1)
    return (min(zeros),) if sharers == 1 else zeros


def held_microbatches(settings: Settings) -> float:
    """Most microbatches whose activations the first pipeline stage holds, over all its chunks."""
    ranks, chunks = settings.mesh.pipeline, settings.chunks
    return in_flight(settings.schedule, ranks, chunks, settings.microbatches)[0] / chunks if ranks > 1 else 1.0
