"""Attention against sums written out token by token, whichever kernel computes it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.kernels.dispatch import make_plain
from headway.models.attention import attend_all, choose, see
from thinned import examples


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query at a time, in float64."""
    rows, length, heads, size = q.shape
    share = heads // k.shape[2]
    out = torch.zeros(rows, length, heads, v.shape[3], dtype=torch.float64)
    for b in range(rows):
        for i in range(length):
            seen = [
                j
                for j in range(i + 1)
                if (window is None or i - j < window) and (documents is None or documents[b, i] == documents[b, j])
            ]
            for n in range(heads):
                scores = torch.stack([q[b, i, n].double() @ k[b, j, n // share].double() for j in seen]) / math.sqrt(
                    size
                )
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[n : n + 1].double()))
                shares = scores.softmax(0)
                out[b, i, n] = sum(shares[at] * v[b, j, n // share].double() for at, j in enumerate(seen))
    return out


def draw(rows: int, length: int, heads: int, share: int, seed: int, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, length, heads, 8, generator=generator)
    k, v = (torch.randn(rows, length, heads // share, 8, generator=generator) for _ in range(2))
    documents = (torch.rand(rows, length, generator=generator) < 0.2).int().cumsum(1).int()
    return q, k, v, documents


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 3), st.integers(2, 12), st.sampled_from([(2, 1), (4, 2), (3, 3)]), st.booleans(),
    st.sampled_from([None, 1, 3, 50]), st.sampled_from([None, 2.0]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_every_kernel_on_a_cpu(rows, length, heads, packed, window, softcap, sunk, seed) -> None:
    q, k, v, documents = draw(rows, length, *heads, seed)
    documents = documents if packed else None
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(seed + 1)) if sunk else None
    kernel = choose(q, q.shape[-1], masked=True, capped=softcap is not None, sinks=sunk)
    mask = see(length, {window}, documents, torch.device("cpu"), kernel)[window]
    actual = attend_all(q, k, v, mask, softcap=softcap, sinks_N=sinks)
    expected = by_hand(q, k, v, documents, window, softcap, sinks)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_documents_never_see_each_other() -> None:
    """What one document holds changes nothing in another, not by a bit; nor do gradients pass."""
    q, k, v, documents = draw(2, 20, 4, 2, 3)
    mask = see(20, {None}, documents, torch.device("cpu"), "masked")[None]
    before = attend_all(q, k, v, mask)
    other = documents == 1
    v = v.clone()
    v[other] += 100
    v.requires_grad_()
    after = attend_all(q, k, v, mask)
    assert torch.equal(before[~other], after[~other])
    after[~other].sum().backward()
    assert v.grad is not None
    assert torch.equal(v.grad[other], torch.zeros_like(v.grad[other]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (5.0, False), (None, True)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [True, False])
def test_the_table_s_kernel_equals_plain_on_a_gpu(
    dtype: torch.dtype, softcap: float | None, sunk: bool, window: int | None, packed: bool
) -> None:
    """Forward and backward; blocks that nobody sees are left out, which must change nothing."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    qkv = [
        torch.randn(2, 384, heads, 64, generator=generator, device="cuda", dtype=dtype).requires_grad_()
        for heads in (8, 2, 2)
    ]
    documents = (
        (torch.rand(2, 384, generator=generator, device="cuda") < 0.02).int().cumsum(1).int() if packed else None
    )
    sinks = torch.randn(8, generator=generator, device="cuda").requires_grad_() if sunk else None
    wanted = qkv if sinks is None else [*qkv, sinks]
    results = []
    for kernel, plain in (("flex", ()), ("plain", ("attention",))):
        make_plain(plain)
        try:
            mask = see(384, {window}, documents, torch.device("cuda"), kernel)[window]
            out = attend_all(*qkv, mask, softcap=softcap, sinks_N=sinks)
        finally:
            make_plain(())
        gradients = torch.autograd.grad(out.float().square().sum(), wanted)
        results.append([out.detach(), *gradients])
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for actual, other in zip(*results, strict=True):
        assert (actual.float() - other.float()).norm() < bound * other.float().norm()
