"""Triton if it is installed; else stand-ins, so that kernel files can be imported but not launched.

GPU builds of PyTorch include Triton, CPU builds do not. A kernel shares a file with its reference, so that the file
must be importable without Triton: `triton.jit` then returns a function that raises when launched.
"""

from typing import TYPE_CHECKING, Any

import torch

__all__ = ["INSTALLED", "launchable", "runs_on", "tl", "traced", "triton", "triton_op"]

if TYPE_CHECKING:
    triton: Any
    tl: Any
    triton_op: Any
    INSTALLED: bool
else:
    try:
        import triton
        import triton.language as tl
        from torch.library import triton_op

        INSTALLED = True
    except ImportError:
        INSTALLED = False

        class _Absent:
            """Stands in for anything of Triton that a kernel definition names."""

            def __getattr__(self, _: str) -> "_Absent":
                return self

            def __call__(self, *_: object, **__: object) -> "_Absent":
                return self

            def __getitem__(self, _: object) -> "_Absent":
                raise RuntimeError("cannot launch a Triton kernel: Triton is not installed")

        triton = tl = _Absent()
        triton_op = torch.library.custom_op  # the same operations, which raise when called


def traced() -> bool:
    """Whether a compiler, or another mode that follows operations, sees what is called now."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def launchable(kernel: Any) -> Any:
    """Return a kernel to launch within an operation: for a compiler to see, if one follows it."""
    return torch.library.wrap_triton(kernel) if traced() else kernel


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device: GPUs, and CPUs with Triton's interpreter (tests)."""
    if not INSTALLED:
        return False
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)
