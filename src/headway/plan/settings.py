"""Settings of a training step: mesh, batch, recomputation, schedule, precision, and what the software does."""

from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Literal

from headway.errors import UsageError
from headway.plan.optimizer import OptimizerFootprint

LOW = ("fp8", "mxfp8", "nvfp4")
"""Precisions below bfloat16, used for the GEMMs of linear layers only."""
Recompute = Literal["none", "attention", "selective", "except-attention", "full"]
RECOMPUTE_GEMMS = ("except-attention", "full")
"""Policies that repeat a layer's GEMMs, and with them all of its collectives."""
RECOMPUTE_GATHERS = ("selective", *RECOMPUTE_GEMMS)
"""Policies that repeat collectives between kept results."""
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
ContextAttention = Literal["all-gather", "all-to-all", "ring"]


@dataclass(frozen=True)
class Mesh:
    """The device mesh: the product of all axes but expert, which lies across the others."""

    replicate: int = 1
    """Replicas, which all-reduce gradients."""
    shard: int = 1
    """Data-parallel devices that shard weights, gradients or optimizer states (ZeRO, FSDP)."""
    tensor: int = 1
    """Devices that split each matrix of a layer."""
    pipeline: int = 1
    """Pipeline ranks that layers are spread over."""
    context: int = 1
    """Devices that split each sequence."""
    expert: int = 1
    """Devices that split a layer's experts, taken from the data, context and tensor axes."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Data-parallel size: devices that see different sequences."""
        return self.replicate * self.shard

    @property
    def owners(self) -> int:
        """Devices that weights are sharded over."""
        return self.shard * self.context

    def describe(self) -> str:
        """The axes larger than 1: "shard 16 tensor 2"."""
        parts = [f"{name} {size}" for name, size in asdict(self).items() if size > 1]
        return " ".join(parts) or "one device"


AXES = tuple(item.name for item in fields(Mesh))


def parse_mesh(text: str) -> Mesh:
    """Parse `shard=4,tensor=2`; missing axes are 1, but for shard, of which `expert` is a part."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or not equals or not size.isdecimal() or int(size) < 1:
            near = get_close_matches(name, AXES, n=1) if name not in AXES else []
            meant = f"did you mean {near[0]}?  " if near else ""
            raise UsageError(
                f"--mesh {text}: expected AXIS=SIZE, got {part!r}",
                hint=f"{meant}axes: {', '.join(AXES)}, each 1 or more; for example shard=4,tensor=2",
            )
        if name in sizes:
            raise UsageError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    if "shard" not in sizes and "context" not in sizes:
        sizes["shard"] = sizes.get("expert", 1)
    return Mesh(**sizes)


@dataclass(frozen=True)
class Software:
    """What a training program does, as documented."""

    fusion: Literal["eager", "fused", "compiled"] = "compiled"
    """Whether memory-bound operations are one kernel each, fused by hand, or fused by a compiler."""
    attention: Literal["unfused", "flash1", "triton1", "flash2", "flash3", "cudnn", "cudnn-flash2"] = "cudnn"
    """`cudnn-flash2` is cuDNN's forward pass with flash's backward pass, whose bits repeat."""
    loss: Literal["stepwise", "eager", "sharded", "fused", "chunked"] = "fused"
    """`stepwise` is a vocabulary-parallel loss in float32, one small operation after the other."""
    rotary_passes: float = 2.0
    """Passes over queries and keys that RoPE takes."""
    dropout: bool = False
    separate_projections: bool = False
    """Queries, keys and values, and the gate and up projections, are separate GEMMs."""
    casts_weights: bool = False
    """Autocast: weights are cast at each use, and the residual stream stays in float32."""
    autocasts: bool = False
    """Uses autocast on a single data rank: see `on_mesh`."""
    sequence_parallel: bool = True
    """The tensor axis splits the residual stream between its GEMMs."""
    regathers: bool = True
    """GEMM inputs are gathered over the tensor axis again for the weight gradients; otherwise kept gathered."""
    tensor_overlap: bool = False
    """Collectives of the tensor axis overlap with its GEMMs."""
    weight_overlap: bool = False
    """In the backward pass, collectives of the input gradient overlap with the weight gradient."""
    data_overlap: bool = True
    """Communication of gradients and weights overlaps with compute."""
    prefetch: bool = True
    """Weights of the next layer are gathered during the backward pass of this one; otherwise after it."""
    bucket_bytes: float = 160e6
    """Bucket size of gradients that are reduced once per step."""
    cuda_graphs: bool = False
    """The host replays CUDA graphs, at no host time."""
    recompute_host: float = 1.0
    """Host time of recomputing a layer over its first pass: autograd hooks cost more than a plain second pass."""
    keeps_gemm_outputs: bool = False
    """Selective recomputation keeps the outputs of all GEMMs; otherwise of every other one."""
    waits_each_step: bool = True
    """The host waits for the result of each step before it launches the next."""
    fused_experts: bool = False
    """Rows of experts are spread, weighted and combined in one pass each, and what goes into the down projection is
    made again in the backward pass; otherwise permutations and weights are operations of their own."""
    expert_overlap: float = 0.0
    """Share of the expert all-to-all that overlaps with compute."""
    gathers_low_precision: bool = False
    """Low-precision weights are gathered in that precision."""
    scaling: Literal["tensor", "block", "delayed", "row"] = "tensor"
    """Scaling of 8-bit GEMMs."""
    low_parts: frozenset[str] | None = None
    """Parts of a layer whose GEMMs are low: attention, mlp, experts, shared; None means all but the router, of
    which casts are counted all the same."""
    weight_cast_reuse: int = 1
    """Microbatches per cast of the weights."""
    holds_low_weights: bool = False
    """Where a device has whole weights, low-precision copies of both layouts are held for all microbatches of a step,
    and projections of one input are one GEMM: see `on_mesh`."""
    stream_bytes: int = 2
    """Per element of the residual stream."""
    weight_bytes: int = 2
    """Per weight as GEMMs read it, beside the master copy; 4 if there is only the master."""
    master_bytes: int = 4
    """Per weight for a master copy; 0 without one."""
    moment_bytes: float = 4
    """Per element of each of Adam's two moments."""
    states: OptimizerFootprint | None = None
    """Optimizer state per parameter, unless it is a master copy and two moments of each."""
    gradient_bytes: int = 4
    """Per stored gradient."""
    gradient_buffers: bool = False
    """Gradients live in persistent buffers; otherwise the backward pass allocates them."""
    reduce_bytes: int = 2
    """Per reduced gradient."""
    optimizer_passes: float = 1.0
    """1 for a fused optimizer; an unfused one moves its state several times."""
    offloads_moments: bool = False
    """Adam's moments are offloaded to host memory."""
    updates_in_backward: bool = False
    """Blocks are updated during the backward pass: gradients of only one block exist at a time."""
    loop_s: float | None = None
    """Host seconds per step beside the layers, if known: data, norm, optimizer, logging."""
    is_headway: bool = False
    """Headway's own trainer, modelled in more detail: pipeline stages cut by cost, gradients reduced after the last
    microbatch, memory and communication of embedding and head."""

    def on_mesh(self, mesh: Mesh, passes: int) -> "Software":
        """What it does on a mesh, with `passes` per step: autocast only where FSDP's mixed precision does not apply."""
        if not self.autocasts:
            return self
        single = mesh.data * mesh.context == 1
        casts = single and self.weight_bytes > 2
        # over several passes gradients of bfloat16 weights are summed in float32; FSDP rounds the sum
        summed = single and (passes > 1 or mesh.pipeline > 1)
        gradient_bytes = 2 if self.weight_bytes == 2 and not summed else self.gradient_bytes
        adapted = replace(
            self,
            casts_weights=casts,
            stream_bytes=4 if casts else 2,
            gradient_bytes=gradient_bytes,
            fused_experts=self.fused_experts and mesh.expert == 1,
        )
        if not self.holds_low_weights:
            return adapted
        if not single or mesh.tensor > 1:
            return replace(adapted, holds_low_weights=False)
        return replace(adapted, separate_projections=False, weight_cast_reuse=passes)


@dataclass(frozen=True)
class MicrobatchShape:
    """One microbatch as one device sees it."""

    sequences: int
    seq: int
    """Tokens per full sequence."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    precision: str = "bf16"
    """Of the GEMMs of linear layers; if it is low, everything else runs in bfloat16."""
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""

    @property
    def width(self) -> int:
        """Bytes per activation."""
        return 4 if self.precision == "float32" else 2

    @property
    def high_precision(self) -> str:
        """Precision of GEMMs that are never low: attention, head, router."""
        return "float32" if self.precision == "float32" else "bf16"

    @property
    def tokens(self) -> float:
        """Tokens per device, before tensor parallelism."""
        return self.sequences * self.seq / self.context


@dataclass(frozen=True)
class Settings:
    """Everything that determines how a training step runs."""

    mesh: Mesh
    seq: int
    microbatch: int
    """Sequences per forward and backward pass of a data rank."""
    batch: int
    """Sequences per step, over all data ranks."""
    zero: int = 3
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights; 0 nothing."""
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Chunks of layers per pipeline rank (interleaving)."""
    precision: str = "bf16"
    software: Software = field(default_factory=Software)
    reduces_each: bool = False
    """Headway's trainer without a pipeline: reduce-scatter gradients in every microbatch, not only the last."""
    keeps_weights: bool = False
    """Gathered weights stay until the backward pass (FSDP's SHARD_GRAD_OP)."""
    offloaded: float = 0.0
    """Share of activations offloaded to host memory."""
    frozen: bool = False
    """LoRA-like: no weight gradients and no update, adapters aside."""
    imbalance: float = 1.0
    """Tokens of the busiest expert's device over the mean."""
    recompute_blocks: int | None = None
    """Recomputed layers per device, from the first on; None means all."""
    stages: tuple[int, ...] | None = None
    """Layers per pipeline stage; None leaves the cut to the trainer."""
    context_attention: ContextAttention | None = None
    """How attention reaches other devices' parts of a sequence; None: as `context.context_attention` chooses."""

    @property
    def microbatches(self) -> int:
        """Microbatches per data rank and step."""
        return max(1, round(self.batch / (self.mesh.data * self.microbatch)))

    @property
    def shape(self) -> MicrobatchShape:
        """One microbatch as one device sees it."""
        mesh = self.mesh
        sizes = (self.microbatch, self.seq, mesh.tensor, mesh.context, mesh.expert)
        return MicrobatchShape(*sizes, self.precision, self.imbalance)

    @property
    def stream_width(self) -> int:
        """Bytes per element of the residual stream as it is sent between layer parts and stages."""
        return 4 if self.software.casts_weights else self.shape.width
