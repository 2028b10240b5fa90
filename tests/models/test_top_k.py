"""Log-probabilities of a teacher's likeliest tokens against float64 softmaxes of all logits."""

import pytest
import torch

from headway.models.loss import IGNORED
from headway.models.top_k import logprobs_among, top_k_logprobs

TOKENS, WIDTH, VOCABULARY = 11, 8, 23


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::4] = IGNORED
    return x, weight, labels


def logits_of(x: torch.Tensor, weight: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = x.double() @ weight.double().T
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("count", [1, 5, VOCABULARY])
def test_likeliest_tokens_and_the_rest_are_those_of_a_softmax(count, temperature, softcap):
    x, weight, _ = sample()
    ids, logprobs = top_k_logprobs(x, weight, count, temperature, softcap, rows=4)
    true = (logits_of(x, weight, softcap) / temperature).softmax(dim=1)
    best = true.topk(count, dim=1)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logprobs[:, :count].exp().double(), best.values, rtol=1e-5, atol=1e-7)
    rest = 1 - best.values.sum(dim=1)
    torch.testing.assert_close(logprobs[:, count].exp().double(), rest.clamp(min=0), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("count", [1, 5, VOCABULARY])
def test_log_probabilities_and_gradients_equal_float64(count, temperature, softcap):
    x, weight, labels = (tensor.clone() for tensor in sample())
    ids = torch.stack(
        [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(t))[:count] for t in range(TOKENS)]
    )
    factors = torch.randn(TOKENS, count + 2, generator=torch.Generator().manual_seed(9))
    if count == VOCABULARY:
        factors[:, -1] = 0  # nothing is left: -inf, which no objective passes on
    leaves = x.requires_grad_(), weight.requires_grad_()
    mine = logprobs_among(*leaves, labels, ids, temperature, softcap, rows=4)
    own = torch.autograd.grad(
        (mine[:, : count + 1] * factors[:, : count + 1]).sum() + rest_of(mine, factors, count), leaves
    )
    x64, weight64 = (leaf.detach().double().requires_grad_() for leaf in leaves)
    logits = logits_of(x64, weight64, softcap)
    unmasked = labels != IGNORED
    label = logits.log_softmax(dim=1).gather(1, labels.clamp(min=0)[:, None])
    warm = (logits / temperature).log_softmax(dim=1)
    outside = torch.ones(TOKENS, VOCABULARY, dtype=torch.bool).scatter(1, ids, False)
    rest = torch.where(outside, warm, -torch.inf).logsumexp(dim=1, keepdim=True) if count < VOCABULARY else label * 0
    true = torch.cat((label, warm.gather(1, ids), rest), dim=1).where(unmasked[:, None], 0.0)
    keep = count + 2 if count < VOCABULARY else count + 1
    torch.testing.assert_close(mine.double()[:, :keep], true[:, :keep], rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((true * factors).sum(), (x64, weight64))
    for gradient, reference in zip(own, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)


def rest_of(logprobs: torch.Tensor, factors: torch.Tensor, count: int) -> torch.Tensor:
    return (logprobs[:, -1] * factors[:, -1]).sum() if count < VOCABULARY else logprobs[:, 0].sum() * 0


def test_the_rest_is_exact_where_the_others_are_almost_certain():
    """1 minus the sum of the others would be 0 or a few units of rounding, and its gradient noise."""
    x, weight = torch.tensor([[1.0]]), torch.tensor([[20.0], [0.0], [0.5]])
    result = logprobs_among(x, weight, torch.tensor([0]), torch.tensor([[0]]), 1.0, None, rows=1)
    true = (torch.tensor([20.0, 0.0, 0.5], dtype=torch.float64).softmax(0)[1:].sum()).log()
    assert float(result[0, 2]) == pytest.approx(float(true), rel=1e-6)
