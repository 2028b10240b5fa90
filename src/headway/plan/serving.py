"""Plans inference on one device: memory, largest batch, TTFT, time per token, throughput and cost.

A pass is GEMMs, attention and the head, one after the other; each takes its FLOPs at the chip's speed or its bytes at
the memory's, whichever is longer. Bytes are those of weights and KV cache: activations stay in the chip's caches. The
engine's own work (launches, scheduling, sampling) is not modelled, so that at fidelity `limit` this is a bound.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headway.errors import UsageError
from headway.hardware import CHIPS, Chip, Cluster
from headway.plan.architecture import Architecture, cached_elements, layer_kinds, layer_matrices
from headway.plan.costs import CostModel
from headway.plan.flops import parameters
from headway.plan.layer import Work, speed
from headway.plan.memory import CONTEXT_BYTES
from headway.plan.operations import Operation
from headway.plan.roofline import RooflinePoint

CPU_SHARE, GPU_SHARE = 0.25, 0.9
BLOCK_TOKENS = 64
PASS_TOKENS = 2048
"""The engine's defaults: share of free memory that the KV cache takes, tokens per block, tokens per pass. Repeated from
`inference/text_engine.py`, which needs torch."""
DTYPES = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("float32", 4)}
"""Precisions that models are served in: the planner's name, and bytes per weight and per element of the KV cache."""
KERNEL = "flash2"
"""Attention kernel of prefill, for fidelities with a kernel model."""
GROUPS = {
    "attention": "projections", "mlp": "feed-forward", "router": "router", "experts": "experts",
    "shared": "shared experts",
}  # fmt: skip
"""Matrices by the first part of their name, and what rooflines call them."""
SHOWN_BATCHES = (1, 8, 64, 512, 4096)
MOST_SEQUENCES = 2**24
"""Where the search for a compute-bound batch ends."""
GIB = 2**30


@dataclass(frozen=True)
class ServingLoad:
    """The requests: all of the same length."""

    prompt: int
    """Tokens of a prompt."""
    output: int
    """Tokens generated for it."""

    @property
    def length(self) -> int:
        """Tokens of a finished sequence."""
        return self.prompt + self.output

    @property
    def mean_context(self) -> float:
        """Tokens that a decoding sequence has on average."""
        return self.prompt + self.output / 2


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on one device."""

    capacity: float
    weights: float
    context: float
    """CUDA context and loaded kernels."""
    cache: float
    """KV cache: whole blocks in the share of free memory that the engine takes."""
    token_bytes: int
    """KV cache per token, in all layers."""
    sequence_tokens: int
    """Tokens that a sequence of full length occupies: whole blocks."""

    @property
    def free(self) -> float:
        """Left for activations, CUDA graphs and logits; negative if the weights do not fit."""
        return self.capacity - self.weights - self.context - self.cache

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return round(self.cache / self.token_bytes)

    @property
    def largest_batch(self) -> int:
        """Sequences of full length that fit."""
        return self.cache_tokens // self.sequence_tokens


@dataclass(frozen=True)
class ModelPass:
    """Sequences that go through the model together, each with the same number of new tokens."""

    sequences: float
    start: float
    """Tokens of each that are in the cache already."""
    tokens: float
    """New tokens of each."""
    ends: bool = True
    """Whether each gets a token sampled, so that the head runs."""


@dataclass(frozen=True)
class ServingPoint:
    """A batch in steady state: when a sequence ends, the next prompt takes its place."""

    batch: int
    load: ServingLoad
    step_s: float
    """A decoding pass of the batch."""
    prefill_s: float
    """Prefill per prompt, several in a pass if they are short."""

    @property
    def cycle_s(self) -> float:
        """Time in which every sequence of the batch is replaced once: prefill gives the first token."""
        return self.batch * self.prefill_s + (self.load.output - 1) * self.step_s

    @property
    def prefill_share(self) -> float:
        """Share of the time that goes to prefill."""
        return self.batch * self.prefill_s / self.cycle_s

    @property
    def time_per_token_s(self) -> float:
        """Mean time per generated token of one sequence, with the prefill of others in between."""
        return self.cycle_s / self.load.output

    @property
    def tokens_s(self) -> float:
        """Generated tokens per second and device."""
        return self.batch / self.time_per_token_s

    def cost_per_million(self, price: float) -> float:
        """Dollars per million generated tokens, at a price per device-hour."""
        return price / 3600 / self.tokens_s * 1e6


@dataclass(frozen=True)
class ServingPlan:
    """How a model is served: one server per device."""

    name: str
    architecture: Architecture
    costs: CostModel
    dtype: str
    load: ServingLoad
    memory: ServingMemory
    compute_bound_batch: int | None
    """Smallest batch whose decoding is bound by compute; None if none is."""
    ttft_s: float
    """Time to the first token at an idle server."""
    points: tuple[ServingPoint, ...]
    """By batch: some sizes up to the largest that fits, and the planned one."""
    planned: ServingPoint
    prefill: tuple[RooflinePoint, ...]
    """The operations of one prompt's prefill."""
    decode: tuple[RooflinePoint, ...]
    """The operations of a decoding pass of the planned batch."""
    price: float | None
    """Per device-hour."""

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return self.costs.cluster

    @property
    def peak_flops_s(self) -> float:
        """Peak at the precision of the weights."""
        return self.cluster.chip.peak(self.dtype)


def plan_serving(
    name: str,
    arch: Architecture,
    costs: CostModel,
    load: ServingLoad,
    *,
    dtype: str = "bfloat16",
    concurrency: int | None = None,
    price: float | None = None,
) -> ServingPlan:
    """Plan a model's inference with the given number of concurrent sequences, by default as many as fit."""
    chip = costs.cluster.chip
    chip.peak(dtype)  # raises for unknown ones
    memory = serving_memory(arch, chip, load, dtype)
    if memory.largest_batch < (concurrency or 1):
        raise _does_not_fit(name, arch, chip, load, dtype, concurrency)
    batch = concurrency or memory.largest_batch
    shown = sorted({*(size for size in SHOWN_BATCHES if size < memory.largest_batch), memory.largest_batch, batch})
    points = tuple(_point(arch, costs, load, dtype, size) for size in shown)
    prefill = _merged([part for step in prefill_passes(load) for part in pass_points(arch, costs, dtype, step)])
    return ServingPlan(
        name=name,
        architecture=arch,
        costs=costs,
        dtype=dtype,
        load=load,
        memory=memory,
        compute_bound_batch=_compute_bound_batch(arch, chip, load, dtype),
        ttft_s=sum(point.seconds for point in prefill),
        points=points,
        planned=next(point for point in points if point.batch == batch),
        prefill=prefill,
        decode=tuple(pass_points(arch, costs, dtype, _decoding(load, batch))),
        price=price if price is not None else costs.cluster.price_per_gpu_hour,
    )


def _point(arch: Architecture, costs: CostModel, load: ServingLoad, dtype: str, batch: int) -> ServingPoint:
    prompts = min(batch, max(1, PASS_TOKENS // load.prompt))
    step_s = _seconds(arch, costs, dtype, _decoding(load, batch))
    prefill_s = sum(_seconds(arch, costs, dtype, step) for step in prefill_passes(load, prompts)) / prompts
    return ServingPoint(batch, load, step_s, prefill_s)


# -- memory


def serving_memory(arch: Architecture, chip: Chip, load: ServingLoad, dtype: str) -> ServingMemory:
    """Memory of a device, with a KV cache as large as the engine makes it."""
    _, width = DTYPES[dtype]
    token_bytes = arch.layers * cached_elements(arch) * width
    weights = parameters(arch) * width
    share = CPU_SHARE if chip.name == "cpu" else GPU_SHARE
    room = max(0.0, chip.memory_bytes - weights - CONTEXT_BYTES) * share
    blocks = int(room // (token_bytes * BLOCK_TOKENS))
    return ServingMemory(
        capacity=chip.memory_bytes,
        weights=weights,
        context=CONTEXT_BYTES,
        cache=blocks * token_bytes * BLOCK_TOKENS,
        token_bytes=token_bytes,
        sequence_tokens=-(-load.length // BLOCK_TOKENS) * BLOCK_TOKENS,
    )


def _does_not_fit(
    name: str, arch: Architecture, chip: Chip, load: ServingLoad, dtype: str, concurrency: int | None
) -> UsageError:
    """The error, with what would fit: fewer or shorter sequences, another precision, another chip."""
    memory, batch = serving_memory(arch, chip, load, dtype), concurrency or 1

    def fits(other: Chip, precision: str) -> bool:
        return serving_memory(arch, other, load, precision).largest_batch >= batch

    changes = []
    if memory.largest_batch:
        changes.append(f"--concurrency {memory.largest_batch}")
    tokens = memory.cache_tokens // batch // BLOCK_TOKENS * BLOCK_TOKENS
    if tokens > 1:
        changes.append(f"--prompt and --output of {tokens:,} tokens together")
    if DTYPES[dtype][1] > 2 and "bfloat16" in chip.peaks and fits(chip, "bfloat16"):
        changes.append("--dtype bfloat16")
    others = [other for other in CHIPS if other.name != "cpu" and dtype in other.peaks and fits(other, dtype)]
    if others:
        changes.append(f"--on {min(others, key=lambda other: other.memory_bytes).name}x1")
    need = memory.weights + memory.context
    sequences = f"{batch:,} sequences" if batch > 1 else "one sequence"
    cache = f"a KV cache of {batch * memory.sequence_tokens * memory.token_bytes / GIB:.1f} GB for {sequences}"
    hint = f"what fits: {', or '.join(changes)}" if changes else "no known chip holds it, and a server uses one device"
    return UsageError(
        f"{name} does not fit on {chip.name}: {need / GIB:.1f} GB of weights and context in {dtype}, and {cache} of "
        f"{load.length:,} tokens, with {memory.capacity / GIB:.0f} GB of memory",
        hint=hint,
    )


# -- passes


def prefill_passes(load: ServingLoad, prompts: int = 1) -> Iterator[ModelPass]:
    """The passes of prompts: together if they fit into one pass, in chunks if one alone does not."""
    for start in range(0, load.prompt, PASS_TOKENS):
        tokens = min(PASS_TOKENS, load.prompt - start)
        yield ModelPass(prompts, start, tokens, ends=start + tokens == load.prompt)


def _decoding(load: ServingLoad, batch: int) -> ModelPass:
    return ModelPass(batch, load.mean_context - 1, 1)


def distinct_experts(count: int, top_k: int, tokens: float) -> float:
    """Expected number of experts that some token is routed to, if all are equally likely."""
    return count * (1 - math.pow(1 - top_k / count, tokens))


def pass_operations(arch: Architecture, dtype: str, step: ModelPass) -> Iterator[tuple[str, int, Operation]]:
    """Every operation of a pass: the group it belongs to, in how many layers it is, and one layer's."""
    precision, width = DTYPES[dtype]
    tokens = step.sequences * step.tokens

    def gemm(name: str, rows: float, inputs: int, outputs: int, copies: float = 1.0) -> Operation:
        """Copies of a GEMM whose weights are read once."""
        flops, moved = 2.0 * rows * inputs * outputs * copies, width * inputs * outputs * copies
        return Operation(name, "gemm", "forward", flops, moved, rows, outputs, inputs, copies, precision)

    for experts, layers in layer_kinds(arch):
        for matrix in layer_matrices(arch, experts):
            used = distinct_experts(matrix.copies, matrix.uses, tokens) if matrix.copies > 1 else 1.0
            rows = tokens * matrix.uses / used
            group = GROUPS[matrix.name.partition(".")[0]]
            yield group, layers, gemm(matrix.name, rows, matrix.inputs, matrix.outputs, used)
    windowed = arch.windowed_layers if arch.window is not None else 0
    for layers, window in ((arch.layers - windowed, None), (windowed, arch.window)):
        if layers:
            yield "attention", layers, _attention(arch, dtype, step, window)
    if step.ends:
        yield "head", 1, gemm("head", step.sequences, arch.dim, arch.vocab)


def _attention(arch: Architecture, dtype: str, step: ModelPass, window: int | None) -> Operation:
    """Attention of one layer to the cache, whose tokens are read once per sequence."""
    precision, width = DTYPES[dtype]
    end = step.start + step.tokens
    pairs = _pairs(end, window) - _pairs(step.start, window)
    read = end if window is None else min(end, window - 1 + step.tokens)
    # With latent attention, queries are projected to the cached vectors, whose latent part is also the values.
    sizes = arch.head_dim + arch.value_dim
    if arch.latent is not None:
        sizes = 2 * arch.latent.kv_rank + arch.latent.rope_dim
    return Operation(
        "attention.core",
        "attention" if step.tokens > 1 else "memory",
        "forward",
        flops=2.0 * step.sequences * pairs * arch.heads * sizes,
        bytes=step.sequences * read * cached_elements(arch) * width,
        precision=precision,
        seq=math.ceil(end),
        head_dim=arch.head_dim,
    )


def _pairs(length: float, window: int | None) -> float:
    """Pairs of a token and one that it attends to, in a sequence of this length."""
    inside = length if window is None else min(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * inside


def pass_points(arch: Architecture, costs: CostModel, dtype: str, step: ModelPass) -> tuple[RooflinePoint, ...]:
    """FLOPs, bytes and seconds of a pass, by group of operations."""
    timed = [
        (group, layers, operation, _work(costs, operation))
        for group, layers, operation in pass_operations(arch, dtype, step)
    ]
    mix = sum((_times(work, layers) for _, layers, _, work in timed), Work())
    sustained = speed(costs, DTYPES[dtype][0], mix)
    return _merged(
        [
            RooflinePoint(group, layers * part.flops, layers * part.bytes, layers * sustained.seconds(work))
            for group, layers, part, work in timed
        ]
    )


def _seconds(arch: Architecture, costs: CostModel, dtype: str, step: ModelPass) -> float:
    return sum(point.seconds for point in pass_points(arch, costs, dtype, step))


def _work(costs: CostModel, operation: Operation) -> Work:
    """Device seconds of an operation at full clock; a GEMM that waits for its weights draws little power."""
    rates, bandwidth = costs.rates, costs.cluster.chip.bandwidth_bytes_s
    if operation.kind == "gemm":
        seconds = rates.gemm(operation)
        is_waiting = operation.bytes / bandwidth > operation.flops / rates.peak(operation.precision)
        return Work(memory=seconds) if is_waiting else Work(gemm=seconds)
    if operation.kind == "attention":
        return Work(attention=max(rates.attention(operation, KERNEL), rates.memory(operation)))
    return Work(memory=max(rates.memory(operation), operation.flops / rates.peak(operation.precision)))


def _times(work: Work, times: int) -> Work:
    return Work(times * work.gemm, times * work.attention, times * work.memory)


def _merged(points: list[RooflinePoint]) -> tuple[RooflinePoint, ...]:
    """One point per name, in the order of their first."""
    sums: dict[str, RooflinePoint] = {}
    for point in points:
        old = sums.get(point.name, RooflinePoint(point.name, 0.0, 0.0, 0.0))
        sums[point.name] = RooflinePoint(
            point.name, old.flops + point.flops, old.bytes + point.bytes, old.seconds + point.seconds
        )
    return tuple(sums.values())


def _compute_bound_batch(arch: Architecture, chip: Chip, load: ServingLoad, dtype: str) -> int | None:
    """The smallest batch whose decoding has more FLOPs per byte than the ridge of the roofline.

    Weights are shared by the batch but caches are not, so that long sequences never get there.
    """
    ridge = chip.peak(dtype) / chip.bandwidth_bytes_s

    def is_bound(batch: int) -> bool:
        parts = [(n, operation) for _, n, operation in pass_operations(arch, dtype, _decoding(load, batch))]
        return sum(n * part.flops for n, part in parts) >= ridge * sum(n * part.bytes for n, part in parts)

    if not is_bound(MOST_SEQUENCES):
        return None
    low, high = 0, MOST_SEQUENCES  # intensity rises with the batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bound(middle) else (middle, high)
    return high
