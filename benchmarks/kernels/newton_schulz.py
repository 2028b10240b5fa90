"""The products of a Newton-Schulz step. FLOPs are those needed: of a symmetric product, half."""

from collections.abc import Iterator
from math import prod

import torch
from case import Case

from headway.kernels.newton_schulz import polynomial, reference_polynomial, reference_symmetric, step, symmetric

QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (4, 2048, 2048), (64, 768, 2048)]


def plain_step(x: torch.Tensor) -> torch.Tensor:
    a, b, c = QUINTIC
    return a * x + reference_polynomial(reference_symmetric(x), b, c) @ x


def cases() -> Iterator[Case]:
    _, b, c = QUINTIC
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda")
        x = (x / torch.linalg.matrix_norm(x, keepdim=True)).bfloat16()
        square = symmetric(x)
        *batch, rows, columns = shape
        half, name = prod(batch) * rows * (rows + 1), f"{' x '.join(map(str, shape))} bf16"
        torch.compiler.reset()
        compiled = {
            "x x^T": torch.compile(reference_symmetric, dynamic=False),
            "b A + c A A": torch.compile(lambda s: reference_polynomial(s, b, c), dynamic=False),
            "step": torch.compile(plain_step, dynamic=False),
        }
        ways = {
            "x x^T": {
                "headway": lambda x=x: symmetric(x),
                "eager": lambda x=x: reference_symmetric(x),
                "compiled": lambda x=x, call=compiled["x x^T"]: call(x),
            },
            "b A + c A A": {
                "headway": lambda s=square: polynomial(s, b, c),
                "eager": lambda s=square: reference_polynomial(s, b, c),
                "compiled": lambda s=square, call=compiled["b A + c A A"]: call(s),
            },
            "step": {
                "headway": lambda x=x: step(x, *QUINTIC),
                "eager": lambda x=x: plain_step(x),
                "compiled": lambda x=x, call=compiled["step"]: call(x),
            },
        }
        flops = {"x x^T": half * columns, "b A + c A A": half * rows}
        flops["step"] = sum(flops.values()) + 2 * prod(batch) * rows * rows * columns
        for what, found in ways.items():
            yield Case("newton_schulz", f"{name}, {what}", found, flops=flops[what])
