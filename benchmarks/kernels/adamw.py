"""AdamW of a whole model: precisions of all kinds, in eight bits too.

"torch" is torch._fused_adamw_, which rounds bfloat16 to the nearest and clips nothing.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from case import Case
from torch import Tensor

from headway.kernels.adamw import AdamwPart, adamw, reference
from headway.kernels.adamw_8bit import adamw_8bit, books_of
from headway.kernels.adamw_8bit import reference as reference_8bit
from headway.state.box import Box
from headway.train.optim.eightbit import blocks, codebook

RATES = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FULL, HALF = torch.float32, torch.bfloat16
KINDS = {
    "all fp32": (FULL, FULL, FULL, False),
    "masters, bf16 gradients": (FULL, HALF, FULL, True),
    "fp32, bf16 moments": (FULL, FULL, HALF, False),
    "all bf16, stochastic": (HALF, HALF, HALF, False),
}
CPU = torch.device("cpu")


def shapes(width: int, hidden: int, keys: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Of a decoder's parameters."""
    square, narrow = (width, width), (keys, width)
    layer = [square, narrow, narrow, square, (hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *layer * layers, (width,)]


MODELS = {
    "1B": shapes(2048, 8192, 512, 16, 128256),
    "8 layers of 8B": shapes(4096, 14336, 1024, 8, 16032),
}


def draw(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]


def parts_of(
    sizes: list[tuple[int, ...]], weight: torch.dtype, gradient: torch.dtype, moment: torch.dtype
) -> list[AdamwPart]:
    made = []
    for i, shape in enumerate(sizes):
        w, g = (torch.randn(shape, device="cuda", dtype=dtype) for dtype in (weight, gradient))
        if moment == torch.uint8:
            m, v = (torch.full(shape, code, device="cuda", dtype=moment) for code in (127, 0))
            scales = [torch.zeros(*shape[:-1], blocks(shape[-1]), device="cuda") for _ in range(2)]
        else:
            m, v = (torch.zeros(shape, device="cuda", dtype=moment) for _ in range(2))
            scales = []
        step, box = torch.ones((), device="cuda"), Box((0,) * len(shape), shape)
        made.append(AdamwPart(w, g, m, v, step, f"w{i}", box, shape, scales=(scales[0], scales[1]) if scales else None))
    return made


def fused(parts: list[AdamwPart]) -> Callable[[], object]:
    lists = [[getattr(part, key) for part in parts] for key in ("weight", "gradient", "mean", "square")]
    rates = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    steps = [part.step for part in parts]
    return lambda: torch._fused_adamw_(*lists, [], steps, **rates, amsgrad=False, maximize=False)


def bytes_of(parts: list[AdamwPart]) -> int:
    """Read once, and all but gradients written once."""
    total = 0
    for part in parts:
        kept = [part.weight, part.mean, part.square, *(part.scales or ())]
        total += part.gradient.nbytes + sum(2 * tensor.nbytes for tensor in kept)
        total += 0 if part.shown is None else part.shown.nbytes
    return total


def cases() -> Iterator[Case]:
    for model, sizes in MODELS.items():
        for kind in KINDS:
            yield plain(sizes, f"{model}, {kind}", *KINDS[kind])
        yield eight_bits(sizes, f"{model}, 8-bit moments, fp32", FULL)
        yield eight_bits(sizes, f"{model}, 8-bit moments, bf16", HALF)


def plain(
    sizes: list[tuple[int, ...]],
    shape: str,
    weight: torch.dtype,
    gradient: torch.dtype,
    moment: torch.dtype,
    shown: bool,
) -> Case:
    torch.compiler.reset()
    parts = parts_of(sizes, weight, gradient, moment)
    if shown:
        parts = [replace(part, shown=part.weight.to(HALF)) for part in parts]
    factor = torch.tensor(0.5, device="cuda")
    table = adamw(parts, factor=factor, draw=draw, **RATES)
    ways: dict[str, Callable[[], object]] = {
        "headway": lambda: adamw(parts, factor=factor, draw=draw, before=table, **RATES),
        "eager": lambda: reference(parts, factor=factor, draw=draw, **RATES),
    }
    if HALF not in (weight, moment):
        # tensor by tensor: of all at once, compiling takes minutes
        one = torch.compile(lambda *kept: updated(*kept, factor), dynamic=False)
        ways["compiled"] = lambda: [one(p.weight, p.gradient, p.mean, p.square, p.step, p.shown) for p in parts]
    if weight == gradient == moment:
        ways["torch"] = fused(parts)
    return Case("adamw", shape, ways, bytes=bytes_of(parts))


def updated(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, shown: Tensor | None, factor: Tensor) -> None:
    """The reference of one part."""
    box = Box((0,) * w.ndim, tuple(w.shape))
    reference([AdamwPart(w, g, m, v, step, "", box, tuple(w.shape), shown)], factor=factor, **RATES)


def eight_bits(sizes: list[tuple[int, ...]], shape: str, weight: torch.dtype) -> Case:
    parts = parts_of(sizes, weight, weight, torch.uint8)
    books = books_of(codebook(True, CPU), codebook(False, CPU), torch.device("cuda"))
    factor = torch.tensor(0.5, device="cuda")
    table = adamw_8bit(parts, books, factor=factor, draw=draw, **RATES)
    ways: dict[str, Callable[[], object]] = {
        "headway": lambda: adamw_8bit(parts, books, factor=factor, draw=draw, before=table, **RATES),
        "eager": lambda: reference_8bit(parts, books, factor=factor, draw=draw, **RATES),
    }
    return Case("adamw", shape, ways, bytes=bytes_of(parts))
