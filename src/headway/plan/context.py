"""The context axis: how attention reaches the parts of a sequence that other devices have, and what that moves."""

from typing import NamedTuple

from headway.plan.architecture import Architecture
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.costs import CostModel
from headway.plan.settings import ContextAttention, Settings


class Exchange(NamedTuple):
    """A collective of a layer's attention in each microbatch."""

    operation: str
    bytes: float
    """Of the full tensor."""
    forward: float
    """Calls in the forward pass."""
    backward: float


def context_attention(arch: Architecture, settings: Settings) -> ContextAttention:
    """Return the way of attention: as stated, or the one of all-gather and all-to-all that receives fewer bytes.

    Headway's ring does not overlap with anything yet, so that it is never faster than all-gather; other software is
    assumed to have one that does.
    """
    if settings.context_attention is not None:
        return settings.context_attention
    if not settings.software.is_headway:
        return "ring"
    received = settings.mesh.context * _keys(arch, settings)
    return "all-to-all" if heads_divide(arch, settings) and _heads(arch, settings) < received else "all-gather"


def heads_divide(arch: Architecture, settings: Settings) -> bool:
    """Whether the axis divides the heads that a device of the tensor axis has, as all-to-all needs."""
    size = settings.mesh.tensor * settings.mesh.context
    return arch.heads % size == 0 and arch.kv_heads % size == 0


def exchanges(arch: Architecture, settings: Settings) -> tuple[Exchange, ...]:
    """The collectives of a layer's attention in each microbatch."""
    size = settings.mesh.context
    if size == 1:
        return ()
    match context_attention(arch, settings):
        case "all-gather":
            whole = size * _keys(arch, settings)
            return Exchange("all_gather", whole, 1, 0), Exchange("reduce_scatter", whole, 0, 1)
        case "all-to-all":
            return (Exchange("all_to_all", _heads(arch, settings), 1, 1),)
        case "ring":  # others send keys and values around again in the backward pass, Headway keeps them
            times = size - 1
            return (
                Exchange("send", _keys(arch, settings), times, times if settings.software.is_headway else 2 * times),
            )


def context_seconds(arch: Architecture, settings: Settings, costs: CostModel) -> tuple[float, float]:
    """Seconds of a layer's exchanges, forward and backward."""
    forward = backward = 0.0
    for exchange in exchanges(arch, settings):
        group = exchange_group(settings, exchange)
        seconds = collective_seconds(costs.network, exchange.operation, exchange.bytes, group)
        forward, backward = forward + exchange.forward * seconds, backward + exchange.backward * seconds
    return forward, backward


def exchange_group(settings: Settings, exchange: Exchange) -> DeviceGroup:
    """The devices of an exchange: neighbours of a ring, or the whole axis."""
    mesh = settings.mesh
    if exchange.operation == "send":
        return DeviceGroup(2, max(1, mesh.tensor * mesh.context // 2))
    return DeviceGroup(mesh.context, mesh.tensor)


def kept_bytes(arch: Architecture, settings: Settings) -> float:
    """Bytes of other devices' keys and values that a layer keeps for its backward pass."""
    gathers = settings.mesh.context > 1 and context_attention(arch, settings) == "all-gather"
    return (settings.mesh.context - 1) * _keys(arch, settings) if gathers else 0.0


def _keys(arch: Architecture, settings: Settings) -> float:
    """Bytes of a device's keys and values."""
    heads = max(1.0, arch.kv_heads / settings.mesh.tensor)
    return heads * (arch.head_dim + _value_dim(arch, settings)) * settings.shape.tokens * settings.shape.width


def _heads(arch: Architecture, settings: Settings) -> float:
    """Bytes of a device's queries, keys and values, and of its attention."""
    queries = arch.heads / settings.mesh.tensor * (arch.head_dim + _value_dim(arch, settings))
    return queries * settings.shape.tokens * settings.shape.width + _keys(arch, settings)


def _value_dim(arch: Architecture, settings: Settings) -> int:
    """Headway pads the values of latent attention to the size of keys."""
    return max(arch.head_dim, arch.value_dim) if settings.software.is_headway else arch.value_dim
