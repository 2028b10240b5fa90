"""What the devices of a plan exchange in a step: bytes, groups, links, seconds, and what of them is exposed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.plan.architecture import layer_kinds
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.costs import CostModel
from headway.plan.estimate import Estimate
from headway.plan.layer import HIDDEN_TENSOR, LayerTime, layer_mix
from headway.plan.memory import local_parameters
from headway.plan.rank_share import is_exact
from headway.plan.settings import LOW
from headway.plan.stages import recomputed_share
from headway.plan.step import layer_pieces
from headway.plan.traffic import STATISTICS_BYTES
from headway.plan.trainer_communication import NEVER_HIDDEN, rest_bytes, step_transfers

__all__ = ["CommCost", "communication_costs"]


@dataclass(frozen=True)
class CommCost:
    """One kind of exchange."""

    name: str
    operation: str
    bytes: float
    """Of the whole tensor, as `collective_seconds` counts it."""
    group: DeviceGroup
    level: str
    """The slowest links it crosses."""
    seconds: float
    """Of one."""
    times: float
    """A step."""
    exposed: float | None
    """Seconds of a step that nothing hides; None where they are part of the pipeline's bubble."""
    axis: str = ""
    """Of the mesh, where it goes over one alone."""


def communication_costs(estimate: Estimate, costs: CostModel) -> tuple[CommCost, ...]:
    """Every kind of exchange of a step; the exposed seconds sum up to the step's."""
    collector = _Collector(estimate, costs)
    parts = (
        collector.inside(),
        collector.ends(),
        collector.layers(),
        collector.rest(),
        collector.stages(),
        collector.step(),
    )
    return tuple(cost for part in parts for cost in part)


class _Collector:
    """Goes through a plan's axes."""

    def __init__(self, estimate: Estimate, costs: CostModel) -> None:
        self.arch, self.settings, self.costs = estimate.architecture, estimate.settings, costs
        self.mesh, self.software, self.shape = (
            estimate.settings.mesh,
            estimate.settings.software,
            estimate.settings.shape,
        )
        per = self.settings.microbatches / self.mesh.pipeline
        mix = layer_mix(self.arch, self.settings, costs)
        self.layers_here = [(kind, count * per, time) for kind, count, time in mix]
        self.exact = is_exact(self.arch, self.settings)
        self.window = sum(time.backward * times for _, times, time in self.layers_here) / self.settings.microbatches

    def make(
        self,
        name: str,
        operation: str,
        size: float,
        group: DeviceGroup,
        times: float,
        exposed: float | None,
        *,
        axis: str = "",
        pieces: int = 1,
    ) -> CommCost:
        """One exchange, timed."""
        seconds = pieces * collective_seconds(self.costs.network, operation, size / pieces, group)
        level = self.costs.cluster.level(min(self.costs.cluster.devices, group.size * group.stride))
        return CommCost(name, operation, size, group, level.name, seconds, times, exposed, axis)

    def bare(self, name: str, operation: str, size: float, group: DeviceGroup, times: float, axis: str) -> CommCost:
        """One exchange that nothing hides."""
        cost = self.make(name, operation, size, group, times, None, axis=axis)
        return replace(cost, exposed=0.0 if self.costs.ideal else cost.seconds * times)

    def seconds(self, operation: str, size: float, group: DeviceGroup) -> float:
        """Of one collective."""
        return collective_seconds(self.costs.network, operation, size, group)

    # -- inside layers

    def inside(self) -> Iterator[CommCost]:
        """Of the tensor, context and expert axes."""
        for experts, times, time in self.layers_here:
            if self.mesh.tensor > 1:
                yield from self.tensor(experts, times)
            if self.mesh.context > 1:
                yield self.ring(times, time)
            if experts and self.mesh.expert > 1:
                yield from self.to_experts(times)

    def tensor(self, experts: bool, times: float) -> Iterator[CommCost]:
        """Two pairs of gather and scatter a pass and half a gather more, or two all-reduces."""
        size, group = self.shape.tokens * self.arch.dim * self.shape.width, DeviceGroup(self.mesh.tensor)
        left = 0.0 if self.costs.ideal else 1 - HIDDEN_TENSOR if self.software.tensor_overlap else 1.0
        pairs = 1 if experts else 2
        if not self.software.regathers:
            yield from self.kept(pairs, times)
            return
        if self.software.sequence_parallel:
            kinds = (("all_gather", 2.5 * pairs), ("reduce_scatter", 2.0 * pairs))
        else:
            kinds = (("all_reduce", 2.0 * pairs), ("", 0.0))
        for operation, number in kinds:
            if number:
                each = self.seconds(operation, size, group)
                exposed = number * times * each * left
                yield self.make("stream, tensor axis", operation, size, group, number * times, exposed, axis="tensor")

    def kept(self, pairs: int, times: float) -> Iterator[CommCost]:
        """Where what was gathered is kept: each part of a layer has a gather and a scatter in each pass."""
        tokens, group = self.shape.tokens * self.arch.dim, DeviceGroup(self.mesh.tensor)
        for direction, width in (("entering", self.settings.stream_width), ("leaving", self.shape.width)):
            for operation in ("all_gather", "reduce_scatter"):
                yield self.bare(
                    f"stream, {direction} a part", operation, tokens * width, group, pairs * times, "tensor"
                )

    def recompute(self) -> Iterator[CommCost]:
        """Where layers are computed again; those seconds count as recomputation."""
        settings, tokens = self.settings, self.shape.tokens * self.arch.dim
        if self.mesh.tensor == 1 or self.software.regathers or settings.recompute not in ("selective", "full"):
            return
        share = recomputed_share(self.arch.layers, settings) / self.mesh.pipeline * settings.microbatches
        for experts, count in layer_kinds(self.arch):
            pairs, name, group = 1 if experts else 2, "stream, computed again", DeviceGroup(self.mesh.tensor)
            gathered = tokens * settings.stream_width
            yield self.make(name, "all_gather", gathered, group, pairs * count * share, 0.0, axis="tensor")
            if pairs > 1:
                summed = tokens * self.shape.width
                yield self.make(name, "reduce_scatter", summed, group, count * share, 0.0, axis="tensor")

    def ends(self) -> Iterator[CommCost]:
        """Of a vocabulary that is shared out over the tensor axis: embedding, head and loss."""
        if self.mesh.tensor == 1 or not self.exact:
            return
        yield from self.recompute()
        times, group = self.settings.microbatches / self.mesh.pipeline, DeviceGroup(self.mesh.tensor)
        stream = self.shape.tokens * self.arch.dim * self.settings.stream_width
        for operation in ("all_gather", "reduce_scatter"):
            yield self.bare("stream, embedding and head", operation, stream, group, 2 * times, "tensor")
        statistics = STATISTICS_BYTES * self.shape.tokens
        yield self.bare("statistics of the loss", "all_reduce", statistics, group, times, "tensor")

    def ring(self, times: float, time: LayerTime) -> CommCost:
        """Keys and values around the ring, and in the backward pass their gradients too."""
        mesh, arch = self.mesh, self.arch
        heads = max(1.0, arch.kv_heads / mesh.tensor)
        size = heads * (arch.head_dim + arch.value_dim) * self.shape.tokens * self.shape.width
        group = DeviceGroup(2, max(1, mesh.tensor * mesh.context // 2))
        hop = self.seconds("send", size, group)
        ahead, behind = (mesh.context - 1) * hop, 2 * (mesh.context - 1) * hop
        bare = 0.0 if self.costs.ideal else 1 / mesh.context
        exposed = max(ahead * bare, ahead - 0.5 * time.forward) + max(behind * bare, behind - 0.5 * time.input_grad)
        name = "keys and values, context axis"
        return self.make(name, "send", size, group, 3 * (mesh.context - 1) * times, exposed * times)

    def to_experts(self, times: float) -> Iterator[CommCost]:
        """Tokens to their experts, and three times back or the same for gradients."""
        experts = self.arch.experts
        assert experts is not None, "a layer with experts belongs to a model with experts"
        routed = self.shape.tokens / self.mesh.tensor * experts.top_k * self.arch.dim * self.settings.imbalance
        low = 1 if self.settings.precision in LOW else self.shape.width
        left = 0.0 if self.costs.ideal else 1 - self.software.expert_overlap
        group = DeviceGroup(self.mesh.expert)
        for name, size, number in (("tokens to experts", low, 1), ("tokens back, gradients", self.shape.width, 3)):
            each = self.seconds("all_to_all", routed * size, group)
            exposed = number * times * each * left
            yield self.make(name, "all_to_all", routed * size, group, number * times, exposed)

    # -- of layers: weights that are sharded

    def layers(self) -> Iterator[CommCost]:
        """Weights gathered for each layer and microbatch, gradients scattered."""
        mesh, software = self.mesh, self.software
        group = DeviceGroup(mesh.shard * mesh.context, mesh.tensor)
        if self.settings.zero < 3 or group.size == 1 or mesh.pipeline > 1:
            return
        width = 1 if self.settings.precision in LOW and software.gathers_low_precision else self.shape.width
        gathers, scatters = [], []
        for experts, count in layer_kinds(self.arch):
            times = count * self.settings.microbatches
            sums = count if software.is_headway and not self.settings.reduces_each else times
            for name, number, members in layer_pieces(self.arch, experts, self.settings):
                cost = self.make(f"{name}, forward", "all_gather", number * width, members, times, 0.0, axis="shard")
                gathers.append(cost)
                name, size = f"gradients of {name}", number * software.reduce_bytes
                scatters.append(self.make(name, "reduce_scatter", size, members, sums, 0.0, axis="shard"))
        regathers = [replace(cost, name=cost.name.replace("forward", "backward")) for cost in gathers]
        regathers = [] if self.settings.keeps_weights else regathers
        scatters = [] if self.settings.frozen else scatters
        yield from self.exposed(gathers, "total_forward")
        if software.prefetch:
            yield from self.exposed([*regathers, *scatters], "backward")
        else:
            yield from (replace(cost, exposed=cost.times * cost.seconds) for cost in regathers)
            yield from self.exposed(scatters, "backward")

    def rest(self) -> Iterator[CommCost]:
        """What is sharded outside of the layers."""
        weights, gradients = rest_bytes(self.arch, self.settings)
        if not weights:
            return
        group, runs = DeviceGroup(self.mesh.shard, self.mesh.tensor * self.mesh.context), self.settings.microbatches
        yield self.bare("weights of the ends", "all_gather", weights, group, runs, "shard")
        if not self.settings.frozen:
            sums = runs if self.settings.reduces_each else 1
            yield self.bare("gradients of the ends", "reduce_scatter", gradients, group, sums, "shard")

    def exposed(self, costs: list[CommCost], passes: str) -> Iterator[CommCost]:
        """What a pass leaves exposed of all that travels beside it, shared out by how long each takes."""
        total = sum(cost.seconds * cost.times for cost in costs)
        per = self.arch.layers * self.settings.microbatches
        compute = sum(getattr(cost, passes) * times for _, times, cost in self.layers_here) / per
        exposed = max(0.0, total / per - compute * self.costs.parameters.hidden)
        if not self.software.data_overlap:
            exposed = total / per
        if self.costs.ideal:
            exposed = 0.0
        for cost in costs:
            yield replace(cost, exposed=exposed * per * cost.seconds * cost.times / total)

    # -- once a step

    def stages(self) -> Iterator[CommCost]:
        """Activations and their gradients between a pipeline's stages."""
        mesh = self.mesh
        if mesh.pipeline == 1 or self.costs.ideal:
            return
        split = mesh.tensor if self.software.sequence_parallel else 1
        size = self.shape.tokens * self.arch.dim * self.settings.stream_width / split
        group = DeviceGroup(2, mesh.tensor * mesh.context * mesh.data)
        stages = mesh.pipeline * self.settings.chunks
        # the first sends no gradients, and the last no activations
        times = 2.0 * self.settings.microbatches * (stages - 1 if self.exact else stages) / mesh.pipeline
        yield self.make("to the next stage", "send", size, group, times, None, axis="pipeline")

    def step(self) -> Iterator[CommCost]:
        """Gradients that travel once a step, and weights that come back."""
        mesh, software, p = self.mesh, self.software, self.costs.parameters
        if self.settings.frozen or self.costs.ideal:
            return
        if self.exact:
            yield from self.own_step()
            return
        count = sum(local_parameters(self.arch, self.settings))
        if self.settings.zero >= 3 and mesh.pipeline == 1:
            group = DeviceGroup(mesh.replicate, mesh.tensor * mesh.context * mesh.shard)
            size = count / (mesh.shard * mesh.context) * software.reduce_bytes
            if group.size > 1:
                cost = self.make("gradients of the step", "all_reduce", size, group, 1, None, axis="replicate")
                yield replace(cost, exposed=cost.seconds)
            return
        group = DeviceGroup(mesh.data * mesh.context, mesh.tensor)
        if group.size == 1:
            return
        hidden = p.hidden * self.window
        moved = [("gradients of the step", "reduce_scatter", count * software.reduce_bytes, hidden)]
        moved += [("weights of the step", "all_gather", count * 2, hidden / 2)]
        if self.settings.zero == 0:
            moved = [("gradients of the step", "all_reduce", count * software.reduce_bytes, hidden)]
        for name, operation, size, behind in moved:
            pieces = max(1, round(size / software.bucket_bytes))
            cost = self.make(name, operation, size, group, 1, None, pieces=pieces)
            exposed = max(NEVER_HIDDEN * cost.seconds, cost.seconds - behind) if software.data_overlap else cost.seconds
            yield replace(cost, exposed=exposed)

    def own_step(self) -> Iterator[CommCost]:
        """The same of our own trainer."""
        for transfer in step_transfers(self.arch, self.settings, self.costs, self.window):
            cost = self.make(
                transfer.name,
                transfer.operation,
                transfer.bytes,
                transfer.group,
                1,
                transfer.exposed,
                axis=transfer.axis,
            )
            yield replace(cost, seconds=transfer.seconds)
