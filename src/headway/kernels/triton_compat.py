"""Triton where it is installed; where it is not, kernels can be read and named but not launched.

GPU builds of PyTorch bring Triton along, CPU builds do not. A kernel and its reference share a file, so that the file
must be importable without it: then `triton.jit` gives a function back that raises when it is launched.
"""

from typing import TYPE_CHECKING, Any

import torch

__all__ = ["INSTALLED", "runs_on", "tl", "triton", "triton_op"]

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
            """Stands for anything of Triton's that a kernel's definition names."""

            def __getattr__(self, _: str) -> "_Absent":
                return self

            def __call__(self, *_: object, **__: object) -> "_Absent":
                return self

            def __getitem__(self, _: object) -> "_Absent":
                raise RuntimeError("a Triton kernel was launched, and Triton is not installed")

        triton = tl = _Absent()
        triton_op = torch.library.custom_op  # the same operations, which raise when they are called


def runs_on(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of this device: GPUs, and CPUs where Triton interprets (tests)."""
    if not INSTALLED:
        return False
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)
