"""Which kernel does an operation: one table, by device, precision, and what is asked of it. Nothing is patched.

    operation      GPU                                                       CPU
    attention      cuDNN; PyTorch's, where bits repeat; flex for documents,  PyTorch's; plain with caps or sinks
                   windows, soft caps and sinks (heads of 16 and more)
    experts        grouped: one product for all of them (bfloat16)           a loop over those that have tokens
    rms_norm,      Triton, but PyTorch's where tensors are small; inside     PyTorch's
    rope, gated    compiled blocks, the compiler's
    loss           Triton between cuBLAS's products                          PyTorch's, in chunks
    adamw, norm    Triton, all tensors in one launch                         PyTorch's
    newton_schulz  Triton for large matrices, cuBLAS for the rest            PyTorch's

`headway kernels` prints what it says of a machine, with the reasons. A recipe's `train.plain` names operations that
plain PyTorch does instead: what a kernel is held against when something looks wrong.
"""

from collections.abc import Collection
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from headway.kernels.triton_compat import INSTALLED
from headway.recipe.train import Operation

__all__ = [
    "LEAST_HEAD",
    "OPERATIONS",
    "DispatchRow",
    "KernelChoice",
    "Operation",
    "attention",
    "experts",
    "fused",
    "make_plain",
    "rows",
    "uses_triton",
]

OPERATIONS: tuple[Operation, ...] = get_args(Operation)

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
LATEST = 9
"""cuDNN's attention is the fastest from Hopper on; before, flash is."""
IN_BLOCKS: tuple[Operation, ...] = ("rms_norm", "rope", "gated")
"""What a compiler sees together with its neighbours, and joins to them: one pass over memory less than any kernel."""
LEAST_ELEMENTS = 2**22
"""Of a tensor whose pass takes a GPU longer than an operation of PyTorch's own kind takes to be launched."""
LEAST_HEAD = 16
"""Numbers of a head that flex attention takes."""
devices: tuple[str, ...] = ("cuda",)
"""Kinds of device that Triton's kernels run on; tests add the CPU, where Triton interprets them."""
_plain: frozenset[str] = frozenset()


class KernelChoice(NamedTuple):
    """A kernel, and why it is the one."""

    kernel: str
    why: str


def make_plain(operations: Collection[str]) -> None:
    """Have plain PyTorch do these in this process, and what the table says do the rest."""
    global _plain
    _plain = frozenset(operations)


def uses_triton(operation: Operation, x: Tensor) -> bool:
    """Whether a Triton kernel does this operation on a tensor."""
    if x.device.type not in devices:  # the way of every CPU
        return False
    return fused(operation, x.device.type, x.dtype, x.numel(), torch.compiler.is_compiling()).kernel == "triton"


def fused(
    operation: Operation, device: str, dtype: torch.dtype, elements: int = 2**24, compiled: bool = False
) -> KernelChoice:
    """For operations that are Triton's or PyTorch's, by how large a tensor is and whether a compiler sees it."""
    if operation in _plain:
        return KernelChoice("pytorch", "the recipe says so")
    if device not in devices:
        return KernelChoice("pytorch", "Triton's kernels are for GPUs")
    if operation in IN_BLOCKS and compiled:
        return KernelChoice("compiler", "joined to its neighbours in the block")
    if operation in IN_BLOCKS and elements < LEAST_ELEMENTS:
        return KernelChoice("pytorch", "the host takes longer to launch it than the device to do it")
    if not INSTALLED:
        return KernelChoice("pytorch", "Triton is not installed")
    if dtype not in FLOATS:
        return KernelChoice("pytorch", f"no kernel knows {dtype}")
    return KernelChoice("triton", _WHY[operation])


_WHY = {
    "rms_norm": "its backward pass reads and writes everything once",
    "rope": "queries or keys are turned in one pass",
    "gated": "the gate is bent and multiplied in one pass, and made again in the backward pass",
    "loss": "logits become slopes in place, a chunk of tokens at a time",
    "adamw": "all tensors in one launch, with clipping and rounding on the way",
    "norm": "all tensors in one launch",
    "newton_schulz": "half of a symmetric product, where it fills the device",
}


def attention(
    device: str, dtype: torch.dtype, head: int, *, masked: bool, capped: bool, sinks: bool, exact: bool
) -> KernelChoice:
    """By the size of a head, what is seen (`masked`: documents or a window) and how scores are bent; `exact` where bits
    must repeat."""
    if not masked and not capped and not sinks:
        if device != "cuda" or dtype not in HALVES:
            return KernelChoice("sdpa", "PyTorch's kernel for causal attention")
        if "attention" in _plain:
            return KernelChoice("sdpa", "the recipe says so")
        if exact:
            return KernelChoice("sdpa", "PyTorch picks among those whose bits it says repeat")
        return KernelChoice("cudnn", "the fastest for causal attention since Hopper") if _latest() else _FLASH
    if device == "cuda" and "attention" not in _plain and head >= LEAST_HEAD:
        return KernelChoice("flex", "skips blocks of tokens that nobody sees, and bends scores on the way")
    if capped or sinks:
        return KernelChoice("plain", "scores of all pairs in memory")
    return KernelChoice("masked", "PyTorch's kernel, given who sees whom")


_FLASH = KernelChoice("sdpa", "flash is the fastest before Hopper")


def experts(device: str, dtype: torch.dtype, dim: int, hidden: int) -> KernelChoice:
    """By precision and widths: rows of the grouped product begin at multiples of 16 bytes."""
    if "experts" in _plain:
        return KernelChoice("loop", "the recipe says so")
    if device != "cuda" or dtype != torch.bfloat16:
        return KernelChoice("loop", "the grouped product is for bfloat16 on GPUs")
    if dim % 8 or hidden % 8:
        return KernelChoice("loop", "the grouped product needs widths that are multiples of 8")
    return KernelChoice("grouped", "one product for all experts, for which the host never waits")


class DispatchRow(NamedTuple):
    """What runs for one case of an operation."""

    operation: Operation
    case: str
    """Of an operation that has several; empty for the rest."""
    choice: KernelChoice


def rows(device: str, dtype: torch.dtype, *, compiled: bool, exact: bool) -> list[DispatchRow]:
    """What the table says of a kind of device and a precision, all of it."""
    cases = {
        "causal": {"masked": False, "capped": False, "sinks": False},
        "documents or windows": {"masked": True, "capped": False, "sinks": False},
        "soft caps": {"masked": False, "capped": True, "sinks": False},
        "sinks": {"masked": False, "capped": False, "sinks": True},
    }
    found = [
        DispatchRow("attention", case, attention(device, dtype, 64, **asked, exact=exact))
        for case, asked in cases.items()
    ]
    found.append(DispatchRow("experts", "", experts(device, dtype, dim=64, hidden=64)))
    rest = (one for one in OPERATIONS if one not in ("attention", "experts"))
    return found + [DispatchRow(one, "", fused(one, device, dtype, compiled=compiled)) for one in rest]


@torch.compiler.assume_constant_result
def _latest() -> bool:
    """Where there is no GPU to ask, the answer is that of today's."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= LATEST
