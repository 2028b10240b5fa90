"""Rotary positions of queries and keys of models of 1B and 8B, as the projections leave them.

Liger's kernel overwrites its inputs; it moves as many bytes.
"""

from collections.abc import Callable, Iterator

import torch
from case import Case
from torch import Tensor

from headway.kernels.rope import reference, rope

SHAPES = ((4, 4096, 32, 8, 64), (1, 8192, 32, 8, 128))
"""B, L, N, K, H."""


def cases() -> Iterator[Case]:
    for size in SHAPES:
        for backward in (False, True):
            yield turned(*size, backward=backward)


def turned(batch: int, length: int, queries: int, keys: int, size: int, *, backward: bool) -> Case:
    torch.compiler.reset()
    q, k = drawn(batch, length, queries, size), drawn(batch, length, keys, size)
    grads = (drawn(batch, length, queries, size).detach(), drawn(batch, length, keys, size).detach())
    angles = torch.outer(
        torch.arange(length, device="cuda"), 1e4 ** -(torch.arange(size // 2, device="cuda") * 2 / size)
    )
    table = torch.stack((angles.cos(), angles.sin()))
    compiled = torch.compile(reference, dynamic=False)
    ways: dict[str, Callable[[], object]] = {
        "headway": whole(lambda: rope(q, k, table), (q, k), grads, backward),
        "eager": whole(lambda: reference(q, k, table), (q, k), grads, backward),
        "compiled": whole(lambda: compiled(q, k, table), (q, k), grads, backward),
    }
    try:
        from liger_kernel.ops.rope import LigerRopeFunction

        # Heads before tokens, and cosines and sines twice over, as in transformers.
        q_own, k_own = (x.detach().clone().requires_grad_() for x in (q, k))
        cos, sin = torch.cat((table, table), dim=-1).bfloat16().unsqueeze(1)
        own_grads = tuple(x.clone().transpose(1, 2) for x in grads)
        ways["liger"] = whole(
            lambda: LigerRopeFunction.apply(q_own.transpose(1, 2), k_own.transpose(1, 2), cos, sin),
            (q_own, k_own),
            own_grads,
            backward,
        )
    except ImportError:
        pass
    least = (2 if backward else 1) * (2 * (q.nbytes + k.nbytes) + table.nbytes)
    name = f"{batch} x {length} x {queries}+{keys} x {size} bf16, {'both passes' if backward else 'forward'}"
    return Case("rope", name, ways, bytes=least)


def whole(
    call: Callable[[], tuple[Tensor, Tensor]], leaves: tuple[Tensor, ...], grads: tuple[Tensor, ...], backward: bool
) -> Callable[[], object]:
    """Forward alone, as where nothing is trained, or both passes."""
    if backward:
        return lambda: torch.autograd.grad(call(), leaves, grads)

    def forward() -> object:
        with torch.no_grad():
            return call()

    return forward


def drawn(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
