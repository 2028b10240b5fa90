"""How a model is run: the mesh, the batch, what is recomputed, and what the software does well or not."""

from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from headway.errors import UsageError
from headway.plan.optimizer import OptimizerFootprint

__all__ = ["AXES", "LOW", "Mesh", "MicrobatchShape", "Recompute", "Schedule", "Settings", "Software", "parse_mesh"]

LOW = ("fp8", "mxfp8", "nvfp4")
"""Precisions below bfloat16: of the layers' linear products only, between casts."""
Recompute = Literal["none", "attention", "selective", "full"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]


@dataclass(frozen=True)
class Mesh:
    """Devices as a grid: the product of the axes but the expert one, which lies across the others."""

    replicate: int = 1
    """Copies of the whole, which exchange gradients."""
    shard: int = 1
    """Devices that data is spread over and that share weights, gradients or optimizer states."""
    tensor: int = 1
    """Devices that share each matrix of a layer."""
    pipeline: int = 1
    """Stages that layers are spread over."""
    context: int = 1
    """Devices that share each sequence."""
    expert: int = 1
    """Devices that share a layer's experts: taken from the data, context and tensor axes."""

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Devices that see different sequences."""
        return self.replicate * self.shard

    def describe(self) -> str:
        """The axes that are not 1: "shard 16 tensor 2"."""
        parts = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return " ".join(parts) or "one device"


AXES = tuple(item.name for item in fields(Mesh))


def parse_mesh(text: str) -> Mesh:
    """`shard=4,tensor=2`; axes that are left out are 1."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals or not size.isdecimal() or int(size) < 1:
            near = get_close_matches(name, AXES, n=1) if name not in AXES else []
            meant = f"did you mean {near[0]}?  " if near else ""
            raise UsageError(
                f"--mesh {text}: {part!r} is no axis and size",
                hint=f"{meant}axes are {', '.join(AXES)}: shard=4,tensor=2",
            )
        if name in sizes:
            raise UsageError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    return Mesh(**sizes)


@dataclass(frozen=True)
class Software:
    """What the program that trains does; facts that its documentation states."""

    fusion: Literal["eager", "fused", "compiled"] = "compiled"
    """Whether memory-bound operations are one kernel each, fused by hand, or by a compiler."""
    attention: Literal["unfused", "flash1", "triton1", "flash2", "flash3", "cudnn"] = "cudnn"
    loss: Literal["stepwise", "eager", "sharded", "fused", "chunked"] = "fused"
    """Stepwise: the vocabulary-parallel loss in float32, one small operation after the other."""
    rotary_passes: float = 2.0
    """Passes over queries and keys that rotary positions take."""
    dropout: bool = False
    separate_products: bool = False
    """Queries, keys and values, and a feed-forward's two inner matrices, are products of their own."""
    casts_weights: bool = False
    """Autocast: weights are rounded at each use, and the stream stays in float32."""
    autocasts: bool = False
    """It trains so where nobody shares the data: see `on`."""
    sequence_parallel: bool = True
    """Between a tensor axis's products the stream is split over it."""
    regathers: bool = True
    """What products read is gathered over the tensor axis once more for the weights' gradients; otherwise it is kept
    as it was gathered."""
    tensor_overlap: bool = False
    """The tensor axis's exchanges run beside its products."""
    weight_overlap: bool = False
    """In the backward pass, what the tensor axis exchanges of an input's gradient runs beside the weights' gradient."""
    data_overlap: bool = True
    """Gradients and weights travel beside compute."""
    prefetch: bool = True
    """Weights of the layer before are gathered while this one's backward pass runs; otherwise after it."""
    bucket_bytes: float = 160e6
    """Gradients that travel once a step go in pieces of this size."""
    graphs: bool = False
    """The host replays captured graphs: its own time vanishes."""
    recompute_host: float = 1.0
    """Host time of running a layer again over its first pass: hooks into autograd cost more than a plain second
    pass."""
    keeps_products: bool = False
    """Selective recomputation keeps the results of all products; otherwise of every other one."""
    waits: bool = True
    """The host waits for each step's result before it hands over the next."""
    expert_overlap: float = 0.0
    """Share of the exchange with experts that runs beside compute."""
    gathers_low: bool = False
    """Eight-bit weights travel as such."""
    scaling: Literal["tensor", "block", "delayed", "row"] = "tensor"
    """How eight-bit products are scaled."""
    weight_cast_reuse: int = 1
    """Microbatches that one cast of the weights serves."""
    stream_bytes: int = 2
    """Of each element of the residual stream."""
    weight_bytes: int = 2
    """Of each weight as products see it, kept beside the master copy; 4 where the master is the only one."""
    master_bytes: int = 4
    """Of each weight's master copy; 0 where weights are their own."""
    moment_bytes: float = 4
    """Of each of Adam's two moments."""
    states: OptimizerFootprint | None = None
    """What the optimizer keeps of each parameter, where that is more or less than a master copy and two moments of
    all."""
    gradient_bytes: int = 4
    """Of each gradient as it is kept."""
    gradient_buffers: bool = False
    """Gradients have buffers of their own that are never given back; otherwise they come with the backward pass."""
    reduce_bytes: int = 2
    """Of each gradient as it travels."""
    optimizer_passes: float = 1.0
    """1 for a fused optimizer; an unfused one moves its states several times."""
    offloads_moments: bool = False
    """Adam's moments live in the host's memory, and visit the device for each step."""
    updates_early: bool = False
    """Blocks are updated in the backward pass, one by one: only one block's gradients are there at once."""
    loop_s: float | None = None
    """Host seconds of each step beside the layers, where they are known: data, norm, optimizer, logging."""
    own: bool = False
    """Headway's own trainer, of which more is known than of others: a pipeline's stages are cut by cost, gradients wait
    whole for a step's last microbatch, and what the model's ends hold and exchange is counted."""

    def on(self, mesh: Mesh, passes: int) -> "Software":
        """What it does on a mesh, with so many passes a step: autocast only where FSDP's policy, which rounds shards,
        has none to round."""
        if not self.autocasts:
            return self
        alone = mesh.data * mesh.context == 1
        casts = alone and self.weight_bytes > 2
        # gradients of bfloat16 weights are summed in float32 over passes, and FSDP rounds the sum
        summed = alone and (passes > 1 or mesh.pipeline > 1)
        gradient_bytes = 2 if self.weight_bytes == 2 and not summed else self.gradient_bytes
        return replace(self, casts_weights=casts, stream_bytes=4 if casts else 2, gradient_bytes=gradient_bytes)


@dataclass(frozen=True)
class MicrobatchShape:
    """What one device sees of one microbatch."""

    sequences: int
    seq: int
    """Tokens of a whole sequence."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    precision: str = "bf16"
    """Of the layers' linear products; where it is low, everything else runs in bfloat16."""
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "float32" else 2

    @property
    def other(self) -> str:
        """Precision of products that are never low: attention, head, router."""
        return "float32" if self.precision == "float32" else "bf16"

    @property
    def tokens(self) -> float:
        """Tokens of the microbatch on this device, before tensor parallelism splits anything."""
        return self.sequences * self.seq / self.context


@dataclass(frozen=True)
class Settings:
    """One way to run a training step."""

    mesh: Mesh
    seq: int
    microbatch: int
    """Sequences in one forward and backward pass of one data rank."""
    batch: int
    """Sequences in one step, over all data ranks."""
    zero: int = 3
    """What the shard axis spreads: 1 optimizer states, 2 gradients too, 3 weights too; 0 nothing."""
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Chunks of layers a pipeline stage holds: the interleaving."""
    precision: str = "bf16"
    software: Software = field(default_factory=Software)
    reduces_each: bool = False
    """Of our own trainer, without a pipeline: gradients are scattered in every microbatch; otherwise in the last."""
    keeps_weights: bool = False
    """Gathered weights stay until the backward pass (ZeRO 2 of FSDP)."""
    offloaded: float = 0.0
    """Share of the activations that wait in the host's memory."""
    frozen: bool = False
    """Weights stay as they are but for a few small ones beside them: no weight gradients, nothing to update."""
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""
    recompute_blocks: int | None = None
    """How many of a device's layers are recomputed, from the first on; None is all."""
    stages: tuple[int, ...] | None = None
    """Layers of each of a pipeline's stages; None leaves them to the software."""

    @property
    def microbatches(self) -> int:
        """Forward and backward passes of one data rank in a step."""
        return max(1, round(self.batch / (self.mesh.data * self.microbatch)))

    @property
    def shape(self) -> MicrobatchShape:
        """What one device sees of one microbatch."""
        mesh = self.mesh
        sizes = (self.microbatch, self.seq, mesh.tensor, mesh.context, mesh.expert)
        return MicrobatchShape(*sizes, self.precision, self.imbalance)

    @property
    def stream_width(self) -> int:
        """Bytes of an element of the stream as it travels between a layer's parts and between stages."""
        return 4 if self.software.casts_weights else self.shape.width

    def but(self, **changes: Any) -> "Settings":
        """The same with some fields changed."""
        return replace(self, **changes)
