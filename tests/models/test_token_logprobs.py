"""Log-probabilities and entropies against float64 log_softmax, values and gradients, in several chunks."""

import pytest
import torch

from headway.kernels import dispatch
from headway.models import loss as plain
from headway.models.entropy import logprobs_and_entropy
from headway.models.loss import IGNORED, Loss, summed_cross_entropy, token_logprobs


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, 37, (23,), generator=generator)
    labels[::5] = IGNORED
    factors = torch.randn(23, generator=generator)
    return x, weight, labels, factors


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [23, 5, 1])
def test_values_and_gradients_equal_float64(inputs, softcap, rows, temperature, monkeypatch):
    monkeypatch.setattr(plain, "chunk_rows", lambda *_: rows)
    x, weight, labels, factors = inputs
    scores = token_logprobs(x, weight, labels, softcap, temperature)
    gradients = torch.autograd.grad((scores * factors).sum(), (x, weight))
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = capped(x64 @ weight64.T, softcap) / temperature
    chosen = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0].where(labels != IGNORED, 0.0)
    true = torch.autograd.grad((chosen * factors).sum(), (x64, weight64))
    torch.testing.assert_close(scores.double(), chosen, rtol=1e-5, atol=1e-5)
    for gradient, slope in zip(gradients, true, strict=True):
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-5)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [23, 5])
def test_entropies_and_their_gradients_equal_float64(inputs, softcap, rows, temperature):
    x, weight, labels, factors = inputs
    factors = torch.stack((factors, factors.flip(0)), dim=1)
    scores = logprobs_and_entropy(x, weight, labels, temperature, softcap, rows)
    gradients = torch.autograd.grad((scores * factors).sum(), (x, weight))
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logprobs = (capped(x64 @ weight64.T, softcap) / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, labels.clamp(min=0)[:, None])
    entropy = torch.distributions.Categorical(logits=logprobs).entropy()[:, None]
    both = torch.cat((chosen, entropy), dim=1).where(labels[:, None] != IGNORED, 0.0)
    true = torch.autograd.grad((both * factors).sum(), (x64, weight64))
    torch.testing.assert_close(scores.double(), both, rtol=1e-5, atol=1e-5)
    for gradient, slope in zip(gradients, true, strict=True):
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-5)


def test_a_certain_token_has_no_entropy_and_finite_gradients():
    x, weight = torch.tensor([[200.0]], requires_grad=True), torch.tensor([[1.0], [-1.0]])
    scores = logprobs_and_entropy(x, weight, torch.tensor([0]), 0.1, None, 1)
    assert scores.tolist() == [[0.0, 0.0]]
    (gradient,) = torch.autograd.grad(scores.sum(), x)
    assert gradient.tolist() == [[0.0]]


def test_in_exact_mode_entropies_change_no_bit_of_log_probabilities(inputs):
    """The ratio to the sampler's is exactly 1, also where the recipe weighs the entropy."""
    x, weight, labels, _ = inputs
    loss = Loss()
    loss.exact = True
    scores = loss.logprobs_and_entropy(x[None], weight, labels[None], 0.7)
    assert torch.equal(scores[..., 0], loss.logprobs(x[None], weight, labels[None], 0.7))
    (gradient,) = torch.autograd.grad(scores.sum(), weight)
    plain = logprobs_and_entropy(x, weight, labels, 0.7, None, 23)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), weight)[0])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_triton_and_plain_pytorch_give_the_same_scores(inputs, temperature, monkeypatch):
    """At another temperature than 1, the plain path runs wherever the model is."""
    x, weight, labels, _ = inputs
    loss, shape = Loss(2.0), (1, 23)
    both = []
    for devices in (("cuda",), ("cuda", "cpu")):
        monkeypatch.setattr(dispatch, "devices", devices)
        scores = loss.logprobs_and_entropy(x[None], weight, labels[None], temperature)
        logprobs = loss.logprobs(x[None], weight, labels[None], temperature)
        assert scores.shape == (*shape, 2)
        both.append(torch.cat((scores, logprobs[..., None]), dim=2))
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


def test_their_sum_is_the_cross_entropy(inputs):
    x, weight, labels, _ = inputs
    torch.testing.assert_close(-token_logprobs(x, weight, labels).sum(), summed_cross_entropy(x, weight, labels))


@pytest.mark.parametrize(
    "scores", [token_logprobs, lambda *of: logprobs_and_entropy(*of, temperature=0.7, softcap=None, rows=6)]
)
def test_only_what_is_wanted_has_a_gradient(inputs, scores):
    x, weight, labels, _ = inputs
    scores(x, weight.detach(), labels).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
