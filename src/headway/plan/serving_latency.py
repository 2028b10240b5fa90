"""Seconds of an inference pass: a bound by roofline, or a prediction for Headway's engine.

The bound (fidelity `limit`) takes each operation's FLOPs at the chip's peak or its bytes at full bandwidth, whichever
is longer. The prediction adds up what the engine's kernels do not hide from each other:

    products     weights at the bandwidth that they reach, then FLOPs at the sustained rate: few rows overlap little
    attention    decoding: KV cache at the bandwidth that it reaches; prefill: the kernel's TFLOP/s
    other work   norms, rotation, activations and sampling: their bytes at a copy's bandwidth
    kernels      a floor for each, since it starts after the one before it
    host         Python per sequence of a round of passes

Constants are an H200's and scale with a chip's peak and bandwidth (docs/decisions/0041-serving-latency.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.plan.architecture import Architecture, layer_kinds, layer_matrices
from headway.plan.costs import CostModel
from headway.plan.operations import Operation
from headway.plan.rates import generation
from headway.plan.roofline import RooflinePoint
from headway.plan.serving_passes import DTYPES, GROUPS, Span, pass_operations, sampled_rows

FUSED_ROWS = 512
"""Tokens of a pass up to which products are fused: queries with keys and values, gate with up and the activation."""
EVEN_SEQUENCES = 8
"""Sequences from which attention of decoding has their keys shared out evenly, by a list made once per pass."""
FRESH_TOKENS = 1024
"""Prompts of equal length from which attention of a pass without a cache is cuDNN's. These three and `MOST_STEPS` are
repeated from the engine, which needs torch."""
MOST_STEPS = 8
"""Passes per round-trip with the host at most."""
SAMPLING_KERNELS = 5
"""Of a pass: tokens are gathered, normalized, sampled in two steps and kept."""
LOGIT_BYTES = 12
"""Of a logit in float32: written, and read twice."""
PROGRAM_OUTPUTS, PROGRAM_ROWS = 32, 64
"""Exact mode: outputs and rows of a program that reads weights, since sums are not split."""
SPAN_KEYS, SPAN_WAVES = 512, 3
"""Exact mode: keys of a program in decoding, while a program per sequence and key head would be less than so many per
processor."""
EVEN_FLOORS, UNEVEN_FLOORS = 2, 3
"""Kernels' floors of attention of decoding beside reading: 7.4 us where keys are shared out evenly and then joined, 12
us in exact mode, where the longest sequences end alone. Split keys of fewer sequences are counted as those."""
LIBRARY_ROWS = 1024
"""Exact mode: multiples of so many rows are multiplied by cuBLAS, others by kernels that add up in order."""
ORDERED_PRODUCTS = 0.6
"""Exact mode: speed of those kernels over cuBLAS, measured alone (benchmarks/results/exact_h200.json)."""


COLD_START_S, WARM_START_S = 17.9, 8.8
"""From a process's start to the first tokens, with empty caches of compiled kernels and with filled ones; weights are
not read. Measured with Llama 1B on an H200's host, and with no other model."""


@dataclass(frozen=True)
class EngineConstants:
    """Measured on an H200: two with kernels alone, one by a profile, the others fitted by
    benchmarks/plan/fit_serving.py."""

    weights: float = 0.94
    """Share of the chip's bandwidth at which products read weights: the head of 8B at 4.52 TB/s."""
    cache: float = 0.9
    """Share of it at which attention of decoding reads keys and values: 4.32 TB/s, apart from what it always takes."""
    products: float = 0.686
    """Share of the chip's peak that products sustain."""
    row_kernel_s: float = 2.03e-6
    """Floor of a kernel in a pass of one token."""
    kernel_s: float = 3.72e-6
    """Floor of a kernel in any other pass."""
    host_s: float = 6.82e-6
    """Host seconds per sequence of a round that the device waits for: 0.25 s over 256 sequences, in shorter rounds."""
    program_bytes_s: float = 48.6e9
    """Bytes per second that a program reads, which bounds exact mode where few programs have work."""


@dataclass(frozen=True, eq=False)
class PassModel:
    """How long passes of a model take on a device."""

    architecture: Architecture
    costs: CostModel
    dtype: str = "bfloat16"
    exact: bool = False
    """Whether the engine is in exact mode."""
    constants: EngineConstants = field(default_factory=EngineConstants)

    def seconds(self, *spans: Span) -> float:
        """Seconds of a pass."""
        return sum(point.seconds for point in self.points(*spans))

    def host_s(self, sequences: float) -> float:
        """Seconds of a round of passes in which the device waits for the host."""
        return 0.0 if self.costs.ideal else self.constants.host_s * sequences

    def points(self, *spans: Span) -> tuple[RooflinePoint, ...]:
        """FLOPs, bytes and seconds of a pass, by group of operations."""
        counted = pass_operations(self.architecture, self.dtype, *spans)
        if self.costs.ideal:
            return merged(_point(group, layers, part, self._bound(part)) for group, layers, part in counted)
        timing = _Timing(self, spans)
        return merged(
            _point(group, layers, part, timing.seconds(part))
            for operations in (counted, timing.other_operations())
            for group, layers, part in operations
        )

    def _bound(self, operation: Operation) -> float:
        rates = self.costs.rates
        return max(operation.flops / rates.peak(operation.precision), rates.memory(operation))


class _Timing:
    """Times the operations of one pass."""

    def __init__(self, model: PassModel, spans: tuple[Span, ...]) -> None:
        self.model, self.spans, self.constants = model, spans, model.constants
        self.chip, self.kernels = model.costs.cluster.chip, generation(model.costs.cluster.chip)
        self.rows = sum(span.rows for span in spans)
        self.sequences = sum(span.sequences for span in spans)
        self.decodes = all(span.decodes for span in spans)
        self.fused = self.rows <= FUSED_ROWS
        self.single = self.rows == 1 and not model.exact
        self.even = self.decodes and not model.exact and self.sequences >= EVEN_SEQUENCES

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of an operation in one layer."""
        if operation.kind == "gemm":
            return self._product(operation)
        if operation.name == "attention.core":
            return self._attention(operation)
        at_copy = operation.bytes / (self.chip.bandwidth_bytes_s * self.kernels.memory)
        return at_copy + operation.kernels * self._floor_s

    @property
    def _floor_s(self) -> float:
        return self.constants.row_kernel_s if self.single else self.constants.kernel_s

    def _product(self, operation: Operation) -> float:
        rate, share = self.constants.weights * self.chip.bandwidth_bytes_s, self.constants.products
        if self.model.exact:
            programs = math.ceil(operation.n / PROGRAM_OUTPUTS) * math.ceil(operation.m / PROGRAM_ROWS)
            rate = min(rate, operation.count * programs * self.constants.program_bytes_s)
            ordered = operation.m % LIBRARY_ROWS / operation.m
            share /= 1 + ordered * (1 / ORDERED_PRODUCTS - 1)
        compute_s = operation.flops / (share * self.chip.peak(self.model.dtype))
        return operation.bytes / rate + compute_s + self._launches(operation) * self._floor_s

    def _launches(self, operation: Operation) -> int:
        """Return the kernels of a product."""
        separate = {"attention.qkv": 3, "mlp.up": 2, "shared.up": 2}
        return 1 if self.fused else separate.get(operation.name, 1)

    def _attention(self, operation: Operation) -> float:
        rate = self.constants.cache * self.chip.bandwidth_bytes_s
        if self.model.exact and self.decodes:
            programs = self.sequences * self.model.architecture.kv_heads
            if programs < SPAN_WAVES * self.kernels.processors:
                programs *= math.ceil(max(span.start + 1 for span in self.spans) / SPAN_KEYS)
            rate = min(rate, programs * self.constants.program_bytes_s)
        reading_s = operation.bytes / rate
        if operation.kind == "memory":
            return max(reading_s, operation.flops / self.chip.peak(self.model.dtype))
        return max(reading_s, self.model.costs.rates.attention(operation, "cudnn" if self._fresh() else "paged"))

    def _fresh(self) -> bool:
        """Whether all prompts begin with this pass and are of one length, so that no cache is read."""
        lengths = {span.tokens for span in self.spans}
        whole = all(span.start == 0 for span in self.spans) and len(lengths) == 1
        return whole and lengths.pop() >= FRESH_TOKENS and not self.model.exact

    def other_operations(self) -> Iterator[tuple[str, int, Operation]]:
        """Yield norms, rotation, activations and sampling: what a bound does not count."""
        arch = self.model.architecture
        width = DTYPES[self.model.dtype][1]

        def other(name: str, elements: float, kernels: int) -> Operation:
            return Operation(name, "memory", "forward", bytes=elements * self.rows * width, kernels=kernels)

        if not self.single:  # else products normalize what they read
            yield "norms", arch.layers, other("norms", 4 * arch.dim, 2)
        heads = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        yield "attention", arch.layers, other("rotation", 2 * heads, 1 + self._attention_floors())
        if self.even:
            yield "attention", 1, other("list", 0, 1)
        for experts, layers in () if self.fused else layer_kinds(arch):
            for matrix in layer_matrices(arch, experts):
                group, _, part = matrix.name.partition(".")
                if part == "up":
                    yield GROUPS[group], layers, other("activation", 1.5 * matrix.outputs * matrix.uses, 1)
        sampled = sampled_rows(self.spans)
        if sampled:
            moved = float(LOGIT_BYTES) * arch.vocab * sampled
            yield "sampling", 1, Operation("sampling", "memory", "forward", bytes=moved, kernels=SAMPLING_KERNELS)

    def _attention_floors(self) -> int:
        """Return floors of attention; the rate of prefill attention has its own."""
        if not self.decodes:
            return 0
        return EVEN_FLOORS if self.even else UNEVEN_FLOORS


def _point(group: str, layers: int, part: Operation, seconds: float) -> RooflinePoint:
    return RooflinePoint(group, layers * part.flops, layers * part.bytes, layers * seconds)


def merged(points: Iterator[RooflinePoint]) -> tuple[RooflinePoint, ...]:
    """Return one point per name, in the order of their first."""
    sums: dict[str, RooflinePoint] = {}
    for point in points:
        old = sums.get(point.name, RooflinePoint(point.name, 0.0, 0.0, 0.0))
        sums[point.name] = RooflinePoint(
            point.name, old.flops + point.flops, old.bytes + point.bytes, old.seconds + point.seconds
        )
    return tuple(sums.values())
