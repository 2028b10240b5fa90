"""Operations that a compiler sees as one, called without its bookkeeping where nothing compiles.

A registered operation with gradients costs the host three times as much per call as an autograd function around the
same launches (60 and 67 us for both passes beside 14 and 26, on a busy core of an x86 server). Models that are not
compiled, in exact mode for example, wait for the host then: their kernels are shorter than that.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway.kernels.triton_compat import traced


def eager_op(operation: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a registered operation where a compiler or another mode follows it, and else what it
    registers; without gradients."""

    def call(*inputs: Any) -> Any:
        return operation(*inputs) if traced() else launch(*inputs)

    return call


def eager_op_with_gradients(
    operation: Any, launch: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operation's gradients, and return the function to call: see `eager_op`."""
    operation.register_autograd(backward, setup_context=keep)
    names = {
        "forward": staticmethod(launch), "setup_context": staticmethod(keep), "backward": staticmethod(backward)
    }  # fmt: skip
    function: Any = type(launch.__name__, (torch.autograd.Function,), names)

    def call(*inputs: Any) -> Any:
        return operation(*inputs) if traced() else function.apply(*inputs)

    return call
