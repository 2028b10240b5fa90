"""Communication of Headway's trainer outside of layers, with exposed seconds.

Bytes match `traffic.py`. Pipeline ranks differ: per-step transfers are those of the rank with most parameters.
"""

from dataclasses import dataclass

from headway.plan.architecture import Architecture
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.costs import CostModel
from headway.plan.rank_share import block_parameters, is_exact, rest_parameters, worker_blocks
from headway.plan.settings import Settings
from headway.plan.traffic import STATISTICS_BYTES, summed_bytes, tied_bytes

NEVER_HIDDEN = 0.1
"""Share of the per-step gradient reduction that cannot be hidden: its last piece."""
F32 = 4


@dataclass(frozen=True)
class StepTransfer:
    """A collective that runs once per step."""

    name: str
    operation: str
    axis: str
    bytes: float
    group: DeviceGroup
    seconds: float
    exposed: float


def end_comm_seconds(
    arch: Architecture, settings: Settings, costs: CostModel
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of tensor-axis collectives per microbatch, forward and backward: at the embedding; at head and loss."""
    if settings.mesh.tensor == 1 or costs.ideal or not is_exact(arch, settings) or arch.diffusion is not None:
        return (0.0, 0.0), (0.0, 0.0)
    group, tokens = DeviceGroup(settings.mesh.tensor), settings.shape.tokens
    stream = tokens * arch.dim * settings.stream_width
    gather = collective_seconds(costs.network, "all_gather", stream, group)
    scatter = collective_seconds(costs.network, "reduce_scatter", stream, group)
    statistics = collective_seconds(costs.network, "all_reduce", STATISTICS_BYTES * tokens, group)
    return (scatter, gather), (gather + statistics, scatter)


def rest_bytes(arch: Architecture, settings: Settings) -> tuple[float, float]:
    """Bytes of weights and gradients outside of blocks that are gathered and scattered in each microbatch."""
    mesh = settings.mesh
    if mesh.owners == 1 or mesh.pipeline > 1 or not is_exact(arch, settings):
        return 0.0, 0.0
    count = rest_parameters(arch, settings, 0)
    return count * settings.shape.width, count * F32


def end_weight_seconds(arch: Architecture, settings: Settings, costs: CostModel) -> float:
    """Seconds per step to gather those weights, which the first layer waits for, and to scatter their gradients."""
    weights, gradients = rest_bytes(arch, settings)
    if not weights or costs.ideal:
        return 0.0
    group = DeviceGroup(settings.mesh.owners, settings.mesh.tensor)
    gather = settings.microbatches * collective_seconds(costs.network, "all_gather", weights, group)
    scatter = 0.0 if settings.frozen else collective_seconds(costs.network, "reduce_scatter", gradients, group)
    return gather + scatter * (settings.microbatches if settings.reduces_each else 1)


def busiest_rank(arch: Architecture, settings: Settings) -> int:
    """The pipeline rank with most parameters."""
    return max(range(settings.mesh.pipeline), key=lambda rank: _count(arch, settings, rank))


def _count(arch: Architecture, settings: Settings, rank: int) -> int:
    blocks = worker_blocks(arch, settings, rank) * block_parameters(arch, settings.mesh.tensor)
    return blocks + rest_parameters(arch, settings, rank)


def step_transfers(arch: Architecture, settings: Settings, costs: CostModel, window: float) -> list[StepTransfer]:
    """Gradients reduced once per step, overlapped with a backward pass of `window` seconds; a pipeline's weights; and
    gradients of replicated and tied parameters."""
    mesh, rank = settings.mesh, busiest_rank(arch, settings)
    count = _count(arch, settings, rank)
    units = worker_blocks(arch, settings, rank) + 1
    shards, copies = DeviceGroup(mesh.owners, mesh.tensor), DeviceGroup(mesh.replicate, mesh.tensor * mesh.owners)
    hidden = costs.parameters.hidden * window
    transfers: list[StepTransfer] = []

    def add(name: str, operation: str, axis: str, size: float, group: DeviceGroup, pieces: int, hidden: float) -> None:
        if not size or group.size == 1:
            return
        seconds = pieces * collective_seconds(costs.network, operation, size / pieces, group)
        overlaps = hidden and settings.software.data_overlap
        exposed = max(NEVER_HIDDEN * seconds, seconds - hidden) if overlaps else seconds
        transfers.append(StepTransfer(name, operation, axis, size, group, seconds, exposed))

    if mesh.pipeline > 1:
        add("gradients of the step", "reduce_scatter", "shard", count * F32, shards, units, hidden)
        add("weights of the step", "all_gather", "shard", count * settings.shape.width, shards, units, hidden / 2)
    # replicas reduce what the shards have reduced, and both overlap with the same pass
    hidden_copies = hidden if mesh.owners == 1 else hidden / 2
    add("gradients of replicas", "all_reduce", "replicate", count * F32 / mesh.owners, copies, units, hidden_copies)
    summed = summed_bytes(arch, settings, rank)
    add("gradients of replicated weights", "all_reduce", "tensor", summed, DeviceGroup(mesh.tensor), 1, 0.0)
    ends = DeviceGroup(2, mesh.tensor * mesh.owners * mesh.replicate * max(1, mesh.pipeline - 1))
    add("gradients of the tied table", "all_reduce", "pipeline", tied_bytes(arch, settings), ends, 1, 0.0)
    return transfers
