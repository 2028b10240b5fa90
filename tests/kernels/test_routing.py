"""Softmax and top-k in one kernel against PyTorch's, in Triton's interpreter; gradients in float64."""

import pytest
import torch
from torch import Tensor

from headway.kernels.routing import reference, softmax_top_k

RENORMALIZE = pytest.mark.parametrize("renormalize", [False, True])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@RENORMALIZE
@pytest.mark.parametrize(("tokens", "experts", "count"), [(1, 1, 1), (20, 5, 3), (17, 64, 8), (0, 4, 2)])
def test_weights_choices_and_gradients_are_pytorch_s(tokens: int, experts: int, count: int, renormalize: bool) -> None:
    logits, dweights = drawn(tokens, experts).requires_grad_(), drawn(tokens, count, seed=1)
    weights, chosen = softmax_top_k(logits, count, renormalize)
    (dlogits,) = torch.autograd.grad(weights, logits, dweights)
    wide = logits.detach().double().requires_grad_()
    right, wanted = wide.softmax(dim=-1).topk(count, dim=-1)
    right = right / right.sum(dim=-1, keepdim=True) if renormalize else right
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights.double(), right.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        dlogits.double(), torch.autograd.grad(right, wide, dweights.double())[0], rtol=1e-4, atol=1e-6
    )


def test_of_equally_likely_experts_the_first_are_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 3.0, 1.0]])
    weights, chosen = softmax_top_k(logits, 2, renormalize=False)
    assert chosen.tolist() == [[1, 2], [0, 1], [0, 2]]
    torch.testing.assert_close(weights, reference(logits, 2, renormalize=False)[0])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_logits_that_are_not_finite_choose_experts_that_exist() -> None:
    logits = torch.full((3, 5), torch.nan)
    logits[1] = torch.inf
    logits[2, 3] = torch.nan
    _, chosen = softmax_top_k(logits, 2, renormalize=True)
    assert ((chosen >= 0) & (chosen < 5)).all()


def test_a_token_is_routed_the_same_alone() -> None:
    logits = drawn(40, 24).bfloat16()
    together = softmax_top_k(logits, 4, renormalize=True)
    for token in (0, 39):
        for got, want in zip(softmax_top_k(logits[token : token + 1], 4, renormalize=True), together, strict=True):
            assert torch.equal(got[0], want[token])


@pytest.mark.gpu
@RENORMALIZE
def test_choices_on_a_gpu_are_pytorch_s(renormalize: bool) -> None:
    logits = drawn(5000, 64).cuda()
    for got, want in zip(softmax_top_k(logits, 8, renormalize), reference(logits, 8, renormalize), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
