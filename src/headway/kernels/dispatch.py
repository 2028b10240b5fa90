"""Kernel dispatch: one table from operation, device, precision and features to a kernel. Nothing is patched.

    operation      GPU                                                       CPU
    attention      cuDNN; PyTorch's, where bits repeat; for documents cuDNN  PyTorch's; plain with caps or sinks
                   over ragged rows if nvidia-cudnn-frontend is installed;
                   flex for windows, soft caps, sinks and other documents
                   (heads of 16 and more)
    experts        grouped GEMM over all experts (bfloat16), Triton between  a loop over experts with tokens
    rms_norm,      Triton, but PyTorch's where tensors are small; inside     PyTorch's
    rope, gated    compiled blocks, the compiler's
    modulation,    Triton, with the sums for biases and modulation in the same     PyTorch's
    heads, gelu    pass, but PyTorch's or the compiler's where tensors are small
    loss           Triton between cuBLAS's products                          PyTorch's, in chunks
    adamw, norm    Triton, all tensors in one launch                         PyTorch's
    newton_schulz  Triton for large matrices, cuBLAS for the rest            PyTorch's
    fp8            Triton's casts between cuBLAS's products                  PyTorch's casts, products in float32

In exact mode (`models/exact.py`), products and attention are those of `batch_invariant` instead; on GPUs norms,
rotation and gated activations are Triton's whatever their size.
`headway kernels` prints the table for a machine, with reasons. A recipe's `train.plain` names operations to run in
plain PyTorch instead: the reference when a kernel is in doubt.
"""

from collections.abc import Collection
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from headway.kernels import document_attention, repeatable_attention
from headway.kernels.triton_compat import INSTALLED
from headway.recipe.train import Operation

__all__ = [
    "LEAST_HEAD",
    "OPERATIONS",
    "DispatchRow",
    "KernelChoice",
    "Operation",
    "attention",
    "batch_invariant",
    "exact_triton",
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
"""cuDNN's attention is the fastest since Hopper; before, flash is."""
IN_BLOCKS: tuple[Operation, ...] = ("rms_norm", "rope", "gated")
"""Operations that a compiler fuses with their neighbours, which saves one more pass over memory than a kernel."""
OF_DIFFUSION: tuple[Operation, ...] = ("modulation", "heads", "gelu")
"""Operations of diffusion blocks, whose sums over tokens a compiler makes passes of their own."""
LEAST_ELEMENTS = 2**22
"""Elements from which a pass takes a GPU longer than launching a PyTorch operation."""
LEAST_HEAD = 16
"""Smallest head size of flex attention."""
devices: tuple[str, ...] = ("cuda",)
"""Device types that Triton kernels run on; tests add the CPU, for Triton's interpreter."""
_plain: frozenset[str] = frozenset()


class KernelChoice(NamedTuple):
    """A kernel, and why it was chosen."""

    kernel: str
    why: str


def make_plain(operations: Collection[str]) -> None:
    """Run these operations in plain PyTorch in this process."""
    global _plain
    _plain = frozenset(operations)


def uses_triton(operation: Operation, x: Tensor) -> bool:
    """Whether a Triton kernel runs this operation on a tensor."""
    if x.device.type not in devices:  # fast path of CPUs
        return False
    return fused(operation, x.device.type, x.dtype, x.numel(), torch.compiler.is_compiling()).kernel == "triton"


def fused(
    operation: Operation, device: str, dtype: torch.dtype, elements: int = 2**24, compiled: bool = False
) -> KernelChoice:
    """Choose between Triton, PyTorch and the compiler, by tensor size and whether blocks are compiled."""
    if operation in _plain:
        return KernelChoice("pytorch", "the recipe says so")
    if device not in devices:
        return KernelChoice("pytorch", "Triton's kernels are for GPUs")
    if operation in IN_BLOCKS and compiled:
        return KernelChoice("compiler", "joined to its neighbours in the block")
    if operation in (*IN_BLOCKS, *OF_DIFFUSION) and elements < LEAST_ELEMENTS:
        kernel = "compiler" if compiled else "pytorch"
        return KernelChoice(kernel, "the host takes longer to launch it than the device to do it")
    if not INSTALLED:
        return KernelChoice("pytorch", "Triton is not installed")
    if dtype not in FLOATS:
        return KernelChoice("pytorch", f"no kernel knows {dtype}")
    return KernelChoice("triton", _WHY[operation])


_WHY = {
    "rms_norm": "its backward pass reads and writes everything once",
    "rope": "queries or keys are turned in one pass",
    "gated": "the gate is bent and multiplied in one pass, and made again in the backward pass",
    "modulation": "additions, norms and their sums over tokens in one pass",
    "heads": "norm and rotation in one pass, gradients of all parts in one tensor",
    "gelu": "the bias's gradient is summed where it is written",
    "loss": "logits become slopes in place, a chunk of tokens at a time",
    "adamw": "all tensors in one launch, with clipping and rounding on the way",
    "norm": "all tensors in one launch",
    "newton_schulz": "half of a symmetric product, where it fills the device",
    "fp8": "a tile is read once and its codes are written both ways",
    "experts": "rows are spread, weighted and combined in one pass each",
}


def attention(
    device: str,
    dtype: torch.dtype,
    head: int,
    *,
    masked: bool,
    capped: bool,
    sinks: bool,
    exact: bool,
    full: bool = False,
    documents: bool = False,
) -> KernelChoice:
    """Choose by head size, mask (`masked`: documents or a window) and score features; `exact` requires reproducible
    bits. `full` attention is not causal; the mask of `documents` is of nothing else."""
    if not masked and not capped and not sinks:
        if device != "cuda" or dtype not in HALVES:
            return KernelChoice("sdpa", "PyTorch's kernel for causal attention")
        if "attention" in _plain:
            return KernelChoice("sdpa", "the recipe says so")
        if exact and full and _latest() and repeatable_attention.takes(head):
            return KernelChoice("cudnn-flash", "cuDNN forward and flash backward, whose bits repeat")
        if exact:
            return KernelChoice("sdpa", "PyTorch picks among those whose bits it says repeat")
        return KernelChoice("cudnn", "the fastest since Hopper") if _latest() else _FLASH
    if device == "cuda" and "attention" not in _plain and head >= LEAST_HEAD:
        plain_scores = not capped and not sinks
        if documents and plain_scores and dtype in HALVES and _latest() and document_attention.takes(head):
            if document_attention.installed():
                return KernelChoice("cudnn-ragged", "cuDNN does no work between documents")
            return KernelChoice("flex", "skips masked blocks; nvidia-cudnn-frontend has a faster one for documents")
        return KernelChoice("flex", "skips masked blocks and applies score modifications in the kernel")
    if capped or sinks:
        return KernelChoice("plain", "scores of all pairs in memory")
    return KernelChoice("masked", "PyTorch's kernel, given who sees whom")


_FLASH = KernelChoice("sdpa", "flash is the fastest before Hopper")


def experts(device: str, dtype: torch.dtype, dim: int, hidden: int) -> KernelChoice:
    """Choose by precision and widths: rows of a grouped GEMM are 16-byte aligned."""
    if "experts" in _plain:
        return KernelChoice("loop", "the recipe says so")
    if device != "cuda" or dtype != torch.bfloat16:
        return KernelChoice("loop", "the grouped product is for bfloat16 on GPUs")
    if dim % 8 or hidden % 8:
        return KernelChoice("loop", "the grouped product needs widths that are multiples of 8")
    return KernelChoice("grouped", "one product for all experts, for which the host never waits")


def batch_invariant(device: str, dtype: torch.dtype) -> KernelChoice | None:
    """Choose the kernels of exact mode, which training and inference share; None where there are none yet."""
    if device in devices and (dtype == torch.bfloat16 or device == "cpu") and INSTALLED:
        return KernelChoice("triton", "sums in an order that depends on neither the batch nor the tiling")
    if device == "cpu" and dtype == torch.float32:
        return KernelChoice("tiles", "products of one shape, whose rows do not depend on each other")
    return None


def exact_triton(device: torch.device) -> bool:
    """Whether exact mode's kernels for tensors of a device are Triton's."""
    return device.type in devices


class DispatchRow(NamedTuple):
    """The kernel of one case of an operation."""

    operation: Operation
    case: str
    """The case, for operations with several; else empty."""
    choice: KernelChoice


def rows(device: str, dtype: torch.dtype, *, compiled: bool, exact: bool) -> list[DispatchRow]:
    """Return the whole table for a device type and precision."""
    cases = {
        "causal": {"masked": False, "capped": False, "sinks": False},
        "full": {"masked": False, "capped": False, "sinks": False, "full": True},
        "documents": {"masked": True, "capped": False, "sinks": False, "documents": True},
        "windows": {"masked": True, "capped": False, "sinks": False},
        "soft caps": {"masked": False, "capped": True, "sinks": False},
        "sinks": {"masked": False, "capped": False, "sinks": True},
    }
    attention_and_experts = [
        DispatchRow("attention", case, attention(device, dtype, 64, **asked, exact=exact))
        for case, asked in cases.items()
    ]
    attention_and_experts.append(DispatchRow("experts", "", experts(device, dtype, dim=64, hidden=64)))
    rest = (operation for operation in OPERATIONS if operation not in ("attention", "experts"))
    return attention_and_experts + [
        DispatchRow(operation, "", fused(operation, device, dtype, compiled=compiled)) for operation in rest
    ]


@torch.compiler.assume_constant_result
def _latest() -> bool:
    """Whether the GPU is Hopper or later; without a GPU, assume so."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= LATEST
