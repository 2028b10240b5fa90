"""Benchmarks of one device: GEMMs, attention, memory-bound operations, copies and host overhead.

Inputs are random, since zeros multiply faster, and repetitions rotate over several sets of inputs to avoid cache hits.
Every function yields its results one at a time and leaves no tensor behind.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.hardware.ceilings import AttentionCurve, Backend, CopyCurve, GemmGrid, GemmShape, HostOverhead, MemoryCurve
from headway.measure.timer import DeviceTimer
from headway.models import empty_decoder
from headway.models.rotary import rotary_table, rotate
from headway.recipe import Model

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
    "float8": torch.float8_e4m3fn,
}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Layout = Literal["forward", "input", "weight"]
LAYOUTS: tuple[Layout, ...] = ("forward", "input", "weight")
Mode = Literal["autocast", "plain", "compiled"]
DIRECTIONS: tuple[Literal["to_device", "to_host"], ...] = ("to_device", "to_host")
Case = tuple[Backend, int, bool, int, int]
"""Backend, head size, causal, heads, key heads."""
Work = Callable[[int], object]


def to_microseconds(seconds: float) -> float:
    """Microseconds, rounded to the four digits that are repeatable."""
    return float(f"{seconds * 1e6:.4g}")


class OperandPool:
    """Random numbers on a device, sliced into operands of any shape."""

    def __init__(self, device: torch.device, precision: str, elements: int) -> None:
        values = torch.empty(
            elements, device=device, dtype=torch.bfloat16 if precision == "float8" else DTYPES[precision]
        )
        values.normal_()
        self._values = values.to(DTYPES[precision])

    def cut(self, rows: int, columns: int, turn: int) -> Tensor:
        """A matrix, one of eight that rotate by `turn`."""
        room = self._values.numel() - rows * columns
        assert room >= 0, "the pool is smaller than an operand"
        first = room * (turn % 8) // 8 // 256 * 256
        return self._values[first : first + rows * columns].view(rows, columns)


def gemm_work(pool: OperandPool, precision: str, layout: str, m: int, n: int, k: int) -> Work:
    """A GEMM [m, k] x [k, n] with the operand layout of one of a linear layer's three GEMMs."""
    if precision == "float8":
        scale = torch.ones((), device=pool.cut(1, 1, 0).device)

        def scaled(turn: int) -> Tensor:
            a, b = pool.cut(m, k, turn), pool.cut(n, k, turn + 3)
            return torch._scaled_mm(
                a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return scaled

    def plain(turn: int) -> Tensor:
        a = pool.cut(k, m, turn).t() if layout == "weight" else pool.cut(m, k, turn)
        b = pool.cut(n, k, turn + 3).t() if layout == "forward" else pool.cut(k, n, turn + 3)
        return torch.mm(a, b)

    return plain


def gemm(timer: DeviceTimer, pool: OperandPool, precision: str, sizes: Sequence[int]) -> Iterator[float | GemmGrid]:
    """GEMMs over the full grid; yields the share done, and finally the grid.

    Points are shuffled, so that temperature and clocks do not correlate with size.
    """
    points = [(m, n, k) for m in sizes for n in sizes for k in sizes]
    order = list(range(len(points)))
    random.Random(0).shuffle(order)
    times = [0.0] * len(points)
    for done, at in enumerate(order):
        times[at] = to_microseconds(timer.seconds(gemm_work(pool, precision, "forward", *points[at])))
        yield done / len(points)
    axis = tuple(sizes)
    yield GemmGrid(precision=precision, m=axis, n=axis, k=axis, microseconds=tuple(times))


def layer_shapes(widths: Sequence[tuple[int, int, int]], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Tokens, outputs and inputs of the linear layers of decoders of (width, kv width, hidden width)."""
    linears: list[tuple[int, int]] = []
    for width, kv_width, hidden in widths:
        linears += [(width, width), (kv_width, width), (hidden, width), (width, hidden)]
    return [(count, outputs, inputs) for count in tokens for outputs, inputs in dict.fromkeys(linears)]


def gemm_shapes(
    timer: DeviceTimer, pool: OperandPool, precision: str, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[float | GemmShape]:
    """The three GEMMs of real linear layers; float8 has a single layout."""
    layouts: tuple[Layout, ...] = LAYOUTS[:1] if precision == "float8" else LAYOUTS
    for done, (tokens, outputs, inputs) in enumerate(shapes):
        sizes = {
            "forward": (tokens, outputs, inputs),
            "input": (tokens, inputs, outputs),
            "weight": (outputs, inputs, tokens),
        }
        for layout in layouts:
            m, n, k = sizes[layout]
            seconds = timer.seconds(gemm_work(pool, precision, layout, m, n, k))
            yield GemmShape(precision=precision, layout=layout, m=m, n=n, k=k, microseconds=to_microseconds(seconds))
        yield done / len(shapes)


def attention(
    timer: DeviceTimer, dtype: torch.dtype, seqs: Sequence[int], cases: Sequence[Case], tokens: int
) -> Iterator[float | AttentionCurve]:
    """Attention by (backend, head size, causal, heads, key heads), without unsupported combinations."""
    for done, (backend, head_dim, causal, heads, kv_heads) in enumerate(cases):
        points: list[tuple[int, float, float]] = []
        for seq in seqs:
            times = _attention_times(
                timer, dtype, backend, seq, head_dim, causal, heads, kv_heads, max(1, tokens // seq)
            )
            if times is not None:
                points.append((seq, *times))
        if points:
            lengths, forward, backward = zip(*points, strict=True)
            yield AttentionCurve(
                backend=backend, head_dim=head_dim, causal=causal, heads=heads, kv_heads=kv_heads, tokens=tokens,
                seq=lengths, forward_microseconds=forward, backward_microseconds=backward,
            )  # fmt: skip
        yield done / len(cases)


def _attention_times(
    timer: DeviceTimer,
    dtype: torch.dtype,
    backend: str,
    seq: int,
    head_dim: int,
    causal: bool,
    heads: int,
    kv_heads: int,
    batch: int,
) -> tuple[float, float] | None:
    def draw(count: int) -> Tensor:
        # As projections leave them: heads side by side, transposed.
        x_BLNH = torch.empty(batch, seq, count, head_dim, device=timer.device, dtype=dtype).normal_()
        return x_BLNH.requires_grad_().transpose(1, 2)

    inputs = (draw(heads), draw(kv_heads), draw(kv_heads))

    def forward(_: int) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=kv_heads < heads)

    choice = sdpa_kernel([BACKENDS[backend]]) if backend in BACKENDS else nullcontext()
    with choice, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # backends explain at length why they decline
        try:
            with torch.no_grad():
                forward_s = timer.seconds(forward)
            output = forward(0)
            slope = torch.empty_like(output).normal_()
            backward_s = timer.seconds(lambda _: torch.autograd.grad(output, inputs, slope, retain_graph=True))
        except RuntimeError as error:
            if (
                isinstance(error, torch.OutOfMemoryError)
                or "kernel" in str(error).lower()
                or "cudnn" in str(error).lower()
            ):
                return None
            raise
    return to_microseconds(forward_s), to_microseconds(backward_s)


def memory(timer: DeviceTimer, dtype: torch.dtype, sizes: Sequence[int]) -> Iterator[float | MemoryCurve]:
    """Memory-bound operations by the size of one operand; each counts the minimum bytes it must move."""
    for done, (name, make) in enumerate(OPERATIONS.items()):
        measured: dict[int, float] = {}
        for size in sizes:
            rows = max(1, size // (ROW * dtype.itemsize))
            work, moved = make(rows, dtype, timer.device)
            measured[moved] = to_microseconds(timer.seconds(work))
        yield MemoryCurve(operation=name, bytes=tuple(measured), microseconds=tuple(measured.values()))
        yield done / len(OPERATIONS)


ROW = 4096
TimedWork = tuple[Work, int]


def _draw(rows: int, dtype: torch.dtype, device: torch.device, count: int) -> list[Tensor]:
    return [torch.empty(rows, ROW, device=device, dtype=dtype).normal_() for _ in range(count)]


def _copy(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, out = _draw(rows, dtype, device, 2)
    return lambda _: out.copy_(a), 2 * a.nbytes


def _add(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, b, out = _draw(rows, dtype, device, 3)
    return lambda _: torch.add(a, b, out=out), 3 * a.nbytes


def _silu_mul(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, b = _draw(rows, dtype, device, 2)
    return lambda _: nn.functional.silu(a) * b, 3 * a.nbytes


def _silu_mul_backward(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, b, slope = _draw(rows, dtype, device, 3)
    inputs = (a.requires_grad_(), b.requires_grad_())
    output = nn.functional.silu(a) * b
    return lambda _: torch.autograd.grad(output, inputs, slope, retain_graph=True), 5 * a.nbytes


def _rms_norm(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, w = _draw(rows, dtype, device, 1)[0], torch.ones(ROW, dtype=dtype, device=device)
    return lambda _: nn.functional.rms_norm(a, (ROW,), w, 1e-5), 2 * a.nbytes


def _rms_norm_backward(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a, slope = _draw(rows, dtype, device, 2)
    w = torch.ones(ROW, dtype=dtype, device=device, requires_grad=True)
    inputs = (a.requires_grad_(), w)
    output = nn.functional.rms_norm(a, (ROW,), w, 1e-5)
    return lambda _: torch.autograd.grad(output, inputs, slope, retain_graph=True), 3 * a.nbytes


def _rotary(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a = _draw(rows, dtype, device, 1)[0].view(1, rows, ROW // 128, 128)
    table = rotary_table(torch.arange(rows, device=device), 128, 10_000.0)
    return lambda _: rotate(a, table), 2 * a.nbytes


def _log_softmax(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    a = _draw(rows, dtype, device, 1)[0]
    return lambda _: torch.log_softmax(a, dim=-1, dtype=torch.float32), a.nbytes + 4 * a.numel()


def _cast(rows: int, _: torch.dtype, device: torch.device) -> TimedWork:
    a = _draw(rows, torch.float32, device, 1)[0]
    return lambda _: a.to(torch.bfloat16), a.nbytes + 2 * a.numel()


def _quantize(rows: int, dtype: torch.dtype, device: torch.device) -> TimedWork:
    """To float8 with one scale from the maximum, as float8 GEMMs need."""
    a = _draw(rows, dtype, device, 1)[0]
    return lambda _: (a * (448.0 / a.abs().amax())).to(torch.float8_e4m3fn), a.nbytes + a.numel()


def _norm(rows: int, _: torch.dtype, device: torch.device) -> TimedWork:
    a = _draw(rows, torch.float32, device, 1)[0]
    return lambda _: torch.linalg.vector_norm(a), a.nbytes


def _adamw(rows: int, _: torch.dtype, device: torch.device) -> TimedWork:
    a, slope = _draw(rows, torch.float32, device, 2)
    a.requires_grad_().grad = slope
    optimizer = torch.optim.AdamW([a], lr=1e-4, fused=True)
    return lambda _: optimizer.step(), 7 * a.nbytes


OPERATIONS: dict[str, Callable[[int, torch.dtype, torch.device], TimedWork]] = {
    "copy": _copy,
    "add": _add,
    "silu_mul": _silu_mul,
    "silu_mul_backward": _silu_mul_backward,
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "rotary": _rotary,
    "log_softmax": _log_softmax,
    "cast": _cast,
    "quantize": _quantize,
    "norm": _norm,
    "adamw": _adamw,
}


def copies(timer: DeviceTimer, sizes: Sequence[int]) -> Iterator[float | CopyCurve]:
    """Copies between host and device, pinned and pageable."""
    for done, (direction, pinned) in enumerate([(d, p) for d in DIRECTIONS for p in (True, False)]):
        times = []
        for size in sizes:
            on_host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).random_()
            on_device = torch.empty(size, dtype=torch.uint8, device=timer.device)
            on_device.copy_(on_host)
            source, target = (on_host, on_device) if direction == "to_device" else (on_device, on_host)
            times.append(to_microseconds(timer.seconds(partial(_copy_once, source, target))))
        yield CopyCurve(direction=direction, pinned=pinned, bytes=tuple(sizes), microseconds=tuple(times))
        yield done / 4


def _copy_once(source: Tensor, target: Tensor, _: int) -> Tensor:
    return target.copy_(source, non_blocking=True)


LAYERS = 4
"""Layers per measurement: with one, starting the backward pass would dominate."""


def host(timer: DeviceTimer, mode: Mode) -> Iterator[HostOverhead]:
    """Host time of a decoder layer, on tensors so small that the device never blocks the host."""
    model = Model(vocab_size=64, layers=LAYERS, dim=128, heads=2, kv_heads=1)
    device = timer.device
    plain = torch.bfloat16 if mode == "plain" and device.type == "cuda" else torch.float32
    decoder = empty_decoder(model, device).to(plain)
    blocks: list[Any] = list(decoder.layers)
    weights = [weight for block in blocks for weight in block.parameters()]
    with torch.no_grad():
        for weight in weights:
            weight.normal_(0.0, 0.02)
    if mode == "compiled":
        blocks = [torch.compile(block) for block in blocks]
    x = torch.empty(1, 16, model.dim, device=device, dtype=plain).normal_().requires_grad_()
    context = decoder.context(x[..., 0])
    precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=mode != "plain")

    def forward(_: int) -> Tensor:
        y = x
        with precision:
            for block in blocks:
                y = block(y, context)
        return y

    forward_s = timer.host_seconds(forward)
    output = forward(0)
    slope = torch.empty_like(output).normal_()
    retain = mode != "compiled"  # a compiled graph frees its buffers
    backward_s = (
        timer.host_seconds(lambda _: torch.autograd.grad(output, [x, *weights], slope, retain_graph=True))
        if retain
        else timer.host_seconds(lambda _: torch.autograd.grad(forward(0), [x, *weights], slope)) - forward_s
    )
    yield HostOverhead(
        mode=mode,
        forward_microseconds=to_microseconds(forward_s / LAYERS),
        backward_microseconds=to_microseconds(max(backward_s, 1e-7) / LAYERS),
    )


def smallest_operation(timer: DeviceTimer) -> tuple[float, float]:
    """Host and device microseconds of the smallest operation."""
    x = torch.empty(16, device=timer.device).normal_()

    def work(_: int) -> Tensor:
        return x.add_(1.0)

    host_s = timer.host_seconds(lambda _: [work(i) for i in range(20)]) / 20
    return to_microseconds(host_s), to_microseconds(timer.seconds(work))
