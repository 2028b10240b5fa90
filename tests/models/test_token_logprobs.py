"""Log-probabilities of labels against float64 log_softmax, values and gradients, in several chunks."""

import pytest
import torch

from headway.models import loss as plain
from headway.models.loss import IGNORED, summed_cross_entropy, token_logprobs


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 37, (23,), generator=generator)
    labels[::5] = IGNORED
    factors = torch.randn(23, generator=generator)
    return x, weight, labels, factors


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("rows", "temperature"), [(23, 1.0), (5, 1.0), (1, 1.0), (5, 0.7)])
def test_values_and_gradients_equal_float64(inputs, softcap, rows, temperature, monkeypatch):
    monkeypatch.setattr(plain, "chunk_rows", lambda *_: rows)
    x, weight, labels, factors = inputs
    scores = token_logprobs(x, weight, labels, softcap, temperature)
    gradients = torch.autograd.grad((scores * factors).sum(), (x, weight))
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = x64 @ weight64.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    chosen = (
        (logits / temperature)
        .log_softmax(-1)
        .gather(1, labels.clamp(min=0)[:, None])[:, 0]
        .where(labels != IGNORED, 0.0)
    )
    true = torch.autograd.grad((chosen * factors).sum(), (x64, weight64))
    torch.testing.assert_close(scores.double(), chosen, rtol=1e-5, atol=1e-5)
    for gradient, slope in zip(gradients, true, strict=True):
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-5)


def test_their_sum_is_the_cross_entropy(inputs):
    x, weight, labels, _ = inputs
    torch.testing.assert_close(-token_logprobs(x, weight, labels).sum(), summed_cross_entropy(x, weight, labels))


def test_only_what_is_wanted_has_a_gradient(inputs):
    x, weight, labels, _ = inputs
    token_logprobs(x, weight.detach(), labels).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_head_at_a_temperature_gives_logits_over_it(inputs, softcap):
    x, weight, labels, _ = inputs
    warm, cap = plain.at_temperature(x, softcap, 0.7)
    torch.testing.assert_close(
        token_logprobs(warm, weight, labels, cap), token_logprobs(x, weight, labels, softcap, 0.7)
    )
