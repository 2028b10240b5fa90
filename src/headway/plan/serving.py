"""Plans inference on one device: memory, largest batch, TTFT, time per token, throughput and cost.

A batch in steady state, or a closed workload (`serving_workload.py`); passes take what `serving_latency.py` says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.errors import UsageError
from headway.hardware import CHIPS, Chip, Cluster
from headway.plan.architecture import Architecture, cached_elements
from headway.plan.flops import parameters
from headway.plan.memory import CONTEXT_BYTES
from headway.plan.roofline import RooflinePoint
from headway.plan.serving_latency import PassModel, merged
from headway.plan.serving_passes import DTYPES, Span, pass_operations
from headway.plan.serving_workload import EngineLimits, Request, WorkloadForecast, forecast

CPU_SHARE, GPU_SHARE = 0.25, 0.9
BLOCK_TOKENS = 64
PASS_TOKENS = 2048
SEQUENCES = 256
"""The engine's defaults: share of free memory that the KV cache takes, tokens per block, tokens per pass, sequences at
a time. Repeated from `inference/text_engine.py`, which needs torch."""
SHOWN_BATCHES = (1, 8, 64, 512, 4096)
ENOUGH = 0.99
"""Of the largest throughput: a smaller batch that reaches it is planned, since each sequence waits less there."""
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
    model: PassModel
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
        return self.model.costs.cluster

    @property
    def peak_flops_s(self) -> float:
        """Peak at the precision of the weights."""
        return self.cluster.chip.peak(self.model.dtype)


def plan_serving(
    name: str,
    model: PassModel,
    load: ServingLoad,
    *,
    concurrency: int | None = None,
    pass_tokens: int = PASS_TOKENS,
    price: float | None = None,
) -> ServingPlan:
    """Plan a model's inference with the given number of concurrent sequences.

    By default that is the smallest batch shown that reaches the throughput of the largest one that fits.
    """
    arch, costs, dtype = model.architecture, model.costs, model.dtype
    chip = costs.cluster.chip
    memory = _checked_memory(name, model, load, concurrency)
    sizes = {*(size for size in SHOWN_BATCHES if size < memory.largest_batch), memory.largest_batch}
    shown = sorted(sizes if concurrency is None else {*sizes, concurrency})
    points = tuple(_point(model, load, size, pass_tokens) for size in shown)
    planned = _smallest_fast(points) if concurrency is None else points[shown.index(concurrency)]
    prefill = merged(part for span in prefill_passes(load, pass_tokens=pass_tokens) for part in model.points(span))
    return ServingPlan(
        name=name,
        model=model,
        load=load,
        memory=memory,
        compute_bound_batch=_compute_bound_batch(arch, chip, load, dtype),
        ttft_s=sum(point.seconds for point in prefill),
        points=points,
        planned=planned,
        prefill=prefill,
        decode=model.points(_decoding(load, planned.batch)),
        price=price if price is not None else costs.cluster.price_per_gpu_hour,
    )


def _smallest_fast(points: Sequence[ServingPoint]) -> ServingPoint:
    """Return the smallest batch with nearly the largest throughput."""
    enough = ENOUGH * max(point.tokens_s for point in points)
    return next(point for point in points if point.tokens_s >= enough)


def _point(model: PassModel, load: ServingLoad, batch: int, pass_tokens: int) -> ServingPoint:
    prompts = min(batch, max(1, pass_tokens // load.prompt))
    prefill_s = sum(model.seconds(span) for span in prefill_passes(load, prompts, pass_tokens)) / prompts
    return ServingPoint(batch, load, model.seconds(_decoding(load, batch)), prefill_s)


def prefill_passes(load: ServingLoad, prompts: int = 1, pass_tokens: int = PASS_TOKENS) -> Iterator[Span]:
    """The passes of prompts: together if they fit into one pass, in chunks if one alone does not."""
    for start in range(0, load.prompt, pass_tokens):
        tokens = min(pass_tokens, load.prompt - start)
        yield Span(prompts, start, tokens, ends=start + tokens == load.prompt)


def _decoding(load: ServingLoad, batch: int) -> Span:
    return Span(batch, load.mean_context - 1, 1)


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


# -- closed workloads


@dataclass(frozen=True)
class WorkloadPlan:
    """How a model serves requests that all arrive at once, on one device."""

    name: str
    model: PassModel
    requests: tuple[Request, ...]
    limits: EngineLimits
    memory: ServingMemory
    forecast: WorkloadForecast
    price: float | None
    """Per device-hour."""

    @property
    def cost(self) -> float | None:
        """Dollars for all requests."""
        return None if self.price is None else self.price / 3600 * self.forecast.seconds


def plan_workload(
    name: str,
    model: PassModel,
    requests: Sequence[Request],
    *,
    concurrency: int | None = None,
    pass_tokens: int = PASS_TOKENS,
    price: float | None = None,
) -> WorkloadPlan:
    """Plan requests that all arrive at once, with so many sequences at a time, by default the engine's."""
    longest = max(requests, key=lambda request: request.length)
    memory = _checked_memory(name, model, ServingLoad(longest.prompt, longest.output), None)
    sequences = concurrency or SEQUENCES
    limits = EngineLimits(sequences, max(pass_tokens, sequences + 1), memory.cache_tokens)
    return WorkloadPlan(
        name=name,
        model=model,
        requests=tuple(requests),
        limits=limits,
        memory=memory,
        forecast=forecast(model, requests, limits),
        price=price if price is not None else model.costs.cluster.price_per_gpu_hour,
    )


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


def _checked_memory(name: str, model: PassModel, load: ServingLoad, concurrency: int | None) -> ServingMemory:
    """Return the memory, or raise if not so many sequences fit."""
    chip = model.costs.cluster.chip
    chip.peak(model.dtype)  # raises for unknown ones
    memory = serving_memory(model.architecture, chip, load, model.dtype)
    if memory.largest_batch < (concurrency or 1):
        raise _does_not_fit(name, model.architecture, chip, load, model.dtype, concurrency)
    return memory


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
