"""The norm of a whole model's gradients, and their scaling. "torch" is what torch.nn.utils does with lists."""

from collections.abc import Iterator

import torch
from adamw import MODELS
from case import Case
from torch import Tensor

from headway.kernels.clip import gradient_norm, reference, reference_scale, scale, table_of


def cases() -> Iterator[Case]:
    for model, shapes in MODELS.items():
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            tensors = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
            yield norm(tensors, f"{model} {name}, norm")
            yield scaling(tensors, 0.999, f"{model} {name}, scaled")
            yield scaling(tensors, 1.0, f"{model} {name}, left alone")
            del tensors


def norm(tensors: list[Tensor], shape: str) -> Case:
    torch.compiler.reset()
    table = table_of(tensors)
    # tensor by tensor: of all at once, compiling takes minutes
    one = torch.compile(lambda tensor: tensor.float().square().sum(), dynamic=False)
    ways = {
        "headway": lambda: gradient_norm(table),
        "eager": lambda: reference(tensors),
        "compiled": lambda: torch.stack([one(tensor) for tensor in tensors]).sum().sqrt(),
        "torch": lambda: torch.nn.utils.get_total_norm(tensors),
    }
    return Case("clip", shape, ways, bytes=sum(tensor.nbytes for tensor in tensors))


def scaling(tensors: list[Tensor], share: float, shape: str) -> Case:
    table, factor = table_of(tensors), torch.tensor(share, device="cuda")
    ways = {
        "headway": lambda: scale(table, factor),
        "eager": lambda: reference_scale(tensors, factor),
        "torch": lambda: torch._foreach_mul_(tensors, factor),
    }
    # by one, nothing has to be touched
    return Case("clip", shape, ways, bytes=2 * sum(tensor.nbytes for tensor in tensors) if share != 1.0 else 0)
