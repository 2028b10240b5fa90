"""The collectives of a plan's step: bytes, groups, links, seconds, and how many of them are exposed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headway.plan.architecture import layer_kinds
from headway.plan.collective_times import DeviceGroup, collective_seconds
from headway.plan.context import Exchange, context_seconds, exchange_group, exchanges
from headway.plan.costs import CostModel
from headway.plan.estimate import Estimate
from headway.plan.layer import HIDDEN_TENSOR, LayerTime, crosses, exposed_context, layer_mix
from headway.plan.memory import local_parameters
from headway.plan.rank_share import is_exact
from headway.plan.settings import LOW, RECOMPUTE_GATHERS
from headway.plan.stages import recomputed_share
from headway.plan.step import layer_pieces
from headway.plan.traffic import STATISTICS_BYTES
from headway.plan.trainer_communication import NEVER_HIDDEN, rest_bytes, step_transfers


@dataclass(frozen=True)
class CommCost:
    """One kind of collective or transfer."""

    name: str
    operation: str
    bytes: float
    """Size of the full tensor, as in `collective_seconds`."""
    group: DeviceGroup
    level: str
    """Slowest network level it crosses."""
    seconds: float
    """Of one call."""
    times: float
    """Calls per step."""
    exposed: float | None
    """Exposed seconds per step; None if they are part of the pipeline bubble."""
    axis: str = ""
    """Mesh axis, if it is a single one."""


def communication_costs(plan: Estimate, costs: CostModel) -> tuple[CommCost, ...]:
    """Every collective of a step; the exposed seconds sum to the step's."""
    return tuple(_Collectives(plan, costs).all())


class _Collectives:
    """Enumerates the collectives of a plan by mesh axis."""

    def __init__(self, plan: Estimate, costs: CostModel) -> None:
        self.arch, self.settings, self.costs = plan.architecture, plan.settings, costs
        self.mesh, self.software, self.shape = plan.settings.mesh, plan.settings.software, plan.settings.shape
        per = self.settings.microbatches / self.mesh.pipeline
        mix = layer_mix(self.arch, self.settings, costs)
        self.layer_times = [(kind, count * per, time) for kind, count, time in mix]
        self.exact = is_exact(self.arch, self.settings)
        self.window = sum(time.backward * times for _, times, time in self.layer_times) / self.settings.microbatches

    def all(self) -> Iterator[CommCost]:
        """Every collective of a step."""
        yield from self.in_layers()
        yield from self.ends()
        yield from self.sharded_layers()
        yield from self.end_weights()
        yield from self.between_stages()
        yield from self.once_per_step()

    def cost(
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
        """A timed collective."""
        seconds = pieces * collective_seconds(self.costs.network, operation, size / pieces, group)
        level = self.costs.cluster.level(min(self.costs.cluster.devices, group.size * group.stride))
        return CommCost(name, operation, size, group, level.name, seconds, times, exposed, axis)

    def unhidden(self, name: str, operation: str, size: float, group: DeviceGroup, times: float, axis: str) -> CommCost:
        """A collective that nothing hides."""
        cost = self.cost(name, operation, size, group, times, None, axis=axis)
        return replace(cost, exposed=0.0 if self.costs.ideal else cost.seconds * times)

    def seconds(self, operation: str, size: float, group: DeviceGroup) -> float:
        """Seconds of one collective."""
        return collective_seconds(self.costs.network, operation, size, group)

    # -- inside layers

    def in_layers(self) -> Iterator[CommCost]:
        """Collectives of the tensor, context and expert axes."""
        for experts, times, time in self.layer_times:
            if self.mesh.tensor > 1:
                yield from self.tensor(experts, times)
            if self.mesh.context > 1:
                yield from self.context(times, time)
            if experts and self.mesh.expert > 1:
                yield from self.expert_all_to_all(times)

    def tensor(self, experts: bool, times: float) -> Iterator[CommCost]:
        """Two pairs of all-gather and reduce-scatter per pass and half an all-gather, or two all-reduces."""
        size, group = self.shape.tokens * self.arch.dim * self.shape.width, DeviceGroup(self.mesh.tensor)
        left = 0.0 if self.costs.ideal else 1 - HIDDEN_TENSOR if self.software.tensor_overlap else 1.0
        pairs = 3 if crosses(self.arch) else 1 if experts else 2
        if not self.software.regathers:
            yield from self.gathered_once(pairs, times)
            return
        if self.software.sequence_parallel:
            kinds = (("all_gather", 2.5 * pairs), ("reduce_scatter", 2.0 * pairs))
        else:
            kinds = (("all_reduce", 2.0 * pairs), ("", 0.0))
        for operation, number in kinds:
            if number:
                each = self.seconds(operation, size, group)
                exposed = number * times * each * left
                yield self.cost("stream, tensor axis", operation, size, group, number * times, exposed, axis="tensor")

    def gathered_once(self, pairs: int, times: float) -> Iterator[CommCost]:
        """With gathered inputs kept: an all-gather and a reduce-scatter per layer part and pass."""
        tokens, group = self.shape.tokens * self.arch.dim, DeviceGroup(self.mesh.tensor)
        for direction, width in (("entering", self.settings.stream_width), ("leaving", self.shape.width)):
            for operation in ("all_gather", "reduce_scatter"):
                yield self.unhidden(
                    f"stream, {direction} a part", operation, tokens * width, group, pairs * times, "tensor"
                )

    def recomputed(self) -> Iterator[CommCost]:
        """During recomputation, to which their seconds count."""
        settings, tokens = self.settings, self.shape.tokens * self.arch.dim
        if not self.software.is_headway or settings.recompute not in RECOMPUTE_GATHERS:
            return
        share = recomputed_share(self.arch.layers, settings) / self.mesh.pipeline * settings.microbatches
        for exchange in exchanges(self.arch, settings):
            if exchange.forward:
                count = exchange.forward * self.arch.layers * share
                yield self.exchange("attention, recomputed", exchange, count)
        if self.mesh.tensor == 1 or self.software.regathers:
            return
        for experts, count in layer_kinds(self.arch):
            pairs, name, group = 1 if experts else 2, "stream, recomputed", DeviceGroup(self.mesh.tensor)
            gathered = tokens * settings.stream_width
            yield self.cost(name, "all_gather", gathered, group, pairs * count * share, 0.0, axis="tensor")
            if pairs > 1:
                summed = tokens * self.shape.width
                yield self.cost(name, "reduce_scatter", summed, group, count * share, 0.0, axis="tensor")

    def ends(self) -> Iterator[CommCost]:
        """Vocabulary-parallel embedding, head and loss."""
        yield from self.recomputed()
        if self.mesh.tensor == 1 or not self.exact or self.arch.diffusion is not None:
            return
        times, group = self.settings.microbatches / self.mesh.pipeline, DeviceGroup(self.mesh.tensor)
        stream = self.shape.tokens * self.arch.dim * self.settings.stream_width
        for operation in ("all_gather", "reduce_scatter"):
            yield self.unhidden("stream, embedding and head", operation, stream, group, 2 * times, "tensor")
        statistics = STATISTICS_BYTES * self.shape.tokens
        yield self.unhidden("statistics of the loss", "all_reduce", statistics, group, times, "tensor")

    def context(self, times: float, time: LayerTime) -> Iterator[CommCost]:
        """What attention needs of the parts of sequences that other devices have, and the gradients of that."""
        forward, backward = exposed_context(self.arch, self.settings, self.costs, time.forward, time.input_grad)
        kept = (forward + backward) / max(sum(context_seconds(self.arch, self.settings, self.costs)), 1e-30)
        for exchange in exchanges(self.arch, self.settings):
            count = (exchange.forward + exchange.backward) * times
            cost = self.exchange("attention, context axis", exchange, count)
            yield replace(cost, exposed=cost.seconds * count * kept)

    def exchange(self, name: str, exchange: Exchange, times: float) -> CommCost:
        """An exchange of attention; its exposed seconds count elsewhere."""
        group = exchange_group(self.settings, exchange)
        return self.cost(name, exchange.operation, exchange.bytes, group, times, 0.0, axis="context")

    def expert_all_to_all(self, times: float) -> Iterator[CommCost]:
        """Dispatch of tokens to experts; combine, and both for gradients."""
        experts = self.arch.experts
        assert experts is not None, "a layer with experts belongs to a model with experts"
        routed = self.shape.tokens / self.mesh.tensor * experts.top_k * self.arch.dim * self.settings.imbalance
        low = 1 if self.settings.precision in LOW else self.shape.width
        left = 0.0 if self.costs.ideal else 1 - self.software.expert_overlap
        group = DeviceGroup(self.mesh.expert)
        for name, size, number in (
            ("tokens to experts", low, 1),
            ("tokens from experts, gradients", self.shape.width, 3),
        ):
            each = self.seconds("all_to_all", routed * size, group)
            exposed = number * times * each * left
            yield self.cost(name, "all_to_all", routed * size, group, number * times, exposed)

    # -- sharded weights

    def sharded_layers(self) -> Iterator[CommCost]:
        """Weights gathered and gradients scattered per layer and microbatch."""
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
                cost = self.cost(f"{name}, forward", "all_gather", number * width, members, times, 0.0, axis="shard")
                gathers.append(cost)
                name, size = f"gradients of {name}", number * software.reduce_bytes
                scatters.append(self.cost(name, "reduce_scatter", size, members, sums, 0.0, axis="shard"))
        regathers = [replace(cost, name=cost.name.replace("forward", "backward")) for cost in gathers]
        regathers = [] if self.settings.keeps_weights else regathers
        scatters = [] if self.settings.frozen else scatters
        yield from self.share_exposed(gathers, "total_forward")
        if software.prefetch:
            yield from self.share_exposed([*regathers, *scatters], "backward")
        else:
            yield from (replace(cost, exposed=cost.times * cost.seconds) for cost in regathers)
            yield from self.share_exposed(scatters, "backward")

    def end_weights(self) -> Iterator[CommCost]:
        """Sharded weights of embedding and head."""
        weights, gradients = rest_bytes(self.arch, self.settings)
        if not weights:
            return
        group, runs = DeviceGroup(self.mesh.owners, self.mesh.tensor), self.settings.microbatches
        yield self.unhidden("weights of embedding and head", "all_gather", weights, group, runs, "shard")
        if not self.settings.frozen:
            sums = runs if self.settings.reduces_each else 1
            yield self.unhidden("gradients of embedding and head", "reduce_scatter", gradients, group, sums, "shard")

    def share_exposed(self, costs: list[CommCost], passes: str) -> Iterator[CommCost]:
        """Distribute what a pass leaves exposed over the collectives, in proportion to their seconds."""
        total = sum(cost.seconds * cost.times for cost in costs)
        per = self.arch.layers * self.settings.microbatches
        compute = sum(getattr(time, passes) * times for _, times, time in self.layer_times) / per
        exposed = max(0.0, total / per - compute * self.costs.parameters.hidden)
        if not self.software.data_overlap:
            exposed = total / per
        if self.costs.ideal:
            exposed = 0.0
        for cost in costs:
            yield replace(cost, exposed=exposed * per * cost.seconds * cost.times / total)

    # -- once per step

    def between_stages(self) -> Iterator[CommCost]:
        """Activations and their gradients between pipeline stages."""
        mesh = self.mesh
        if mesh.pipeline == 1 or self.costs.ideal:
            return
        split = mesh.tensor if self.software.sequence_parallel else 1
        size = self.shape.tokens * self.arch.dim * self.settings.stream_width / split
        group = DeviceGroup(2, mesh.tensor * mesh.context * mesh.data)
        stages = mesh.pipeline * self.settings.chunks
        # the first stage sends no gradients, the last no activations
        times = 2.0 * self.settings.microbatches * (stages - 1 if self.exact else stages) / mesh.pipeline
        yield self.cost("to the next stage", "send", size, group, times, None, axis="pipeline")

    def once_per_step(self) -> Iterator[CommCost]:
        """Gradients reduced once per step, and updated weights."""
        mesh, software, p = self.mesh, self.software, self.costs.parameters
        if self.settings.frozen or self.costs.ideal:
            return
        if self.exact:
            yield from self.headway_step()
            return
        count = sum(local_parameters(self.arch, self.settings))
        if self.settings.zero >= 3 and mesh.pipeline == 1:
            group = DeviceGroup(mesh.replicate, mesh.tensor * mesh.context * mesh.shard)
            size = count / (mesh.shard * mesh.context) * software.reduce_bytes
            if group.size > 1:
                cost = self.cost("gradients of the step", "all_reduce", size, group, 1, None, axis="replicate")
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
            cost = self.cost(name, operation, size, group, 1, None, pieces=pieces)
            exposed = max(NEVER_HIDDEN * cost.seconds, cost.seconds - behind) if software.data_overlap else cost.seconds
            yield replace(cost, exposed=exposed)

    def headway_step(self) -> Iterator[CommCost]:
        """The same for Headway's trainer."""
        for transfer in step_transfers(self.arch, self.settings, self.costs, self.window):
            cost = self.cost(
                transfer.name,
                transfer.operation,
                transfer.bytes,
                transfer.group,
                1,
                transfer.exposed,
                axis=transfer.axis,
            )
            yield replace(cost, seconds=transfer.seconds)
