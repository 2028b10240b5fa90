"""Logits of log-probabilities under bfloat16, by the trainer and by the sampler, against products in float64."""

import pytest
import torch

from headway.inference.runner import PagedRunner
from headway.inference.sampler import Sampler
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe import Model

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16 say so once
CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16
CLOSE, ROUNDED = 3e-6, 3e-3
"""What float32 leaves of logits of up to 8, and less than what rounding them to bfloat16 does."""


@pytest.fixture
def decoder() -> Decoder:
    model = Model(layers=1, dim=64, heads=4, kv_heads=2, hidden=96, vocab_size=211, tie_embeddings=False)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=1)
    with torch.no_grad():
        decoder.output_weight.normal_(std=0.25, generator=torch.Generator().manual_seed(2))
    return decoder


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 211, (2, 40), generator=torch.Generator().manual_seed(3))


def in_float64(x_BLD: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    """All log-probabilities of a stream and a head that were rounded to bfloat16."""
    logits = x_BLD.to(BFLOAT16).double() @ weight_VD.to(BFLOAT16).double().T
    return (logits / temperature).log_softmax(-1)


def rounded(x_BLD: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    """The same with logits in bfloat16."""
    logits = x_BLD.to(BFLOAT16) @ weight_VD.to(BFLOAT16).T
    return (logits.float() / temperature).log_softmax(-1)


def largest(values: torch.Tensor, true: torch.Tensor) -> float:
    return float((values.double() - true).detach().abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_of_the_trainer_are_of_float32_logits(decoder, tokens, temperature, entropy):
    labels_BL = tokens.roll(-1, 1)
    scores = decoder.logprobs_and_entropy if entropy else decoder.logprobs
    with torch.autocast("cpu", BFLOAT16):
        x_BLD = decoder.hidden(tokens).detach()
        values = scores(tokens, labels_BL, temperature=temperature)
    true = in_float64(x_BLD, decoder.output_weight, temperature)
    chosen = true.gather(2, labels_BL[..., None])[..., 0]
    logprobs = values[..., 0] if entropy else values
    assert logprobs.dtype == torch.float32
    assert largest(logprobs, chosen) < CLOSE
    coarse = rounded(x_BLD, decoder.output_weight, temperature).gather(2, labels_BL[..., None])[..., 0]
    assert largest(coarse, chosen) > ROUNDED
    if entropy:
        assert largest(values[..., 1], -(true.exp() * true).sum(-1)) < CLOSE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_the_sampler_are_of_float32_logits(decoder, tokens, temperature):
    decoder.to(BFLOAT16)
    with torch.no_grad():
        x_TD = decoder.hidden(tokens).flatten(0, 1)
    assert x_TD.dtype == BFLOAT16
    logits = PagedRunner(decoder, None, CPU).logits(x_TD)
    assert logits.dtype == torch.float32
    values = Sampler(211, CPU).logprobs(logits, [temperature] * len(x_TD))
    true = in_float64(x_TD, decoder.output_weight, temperature)
    assert largest(values, true) < CLOSE
    assert largest(rounded(x_TD, decoder.output_weight, temperature), true) > ROUNDED


def test_gradients_under_bfloat16_are_near_those_in_float64(decoder, tokens):
    labels_BL, weight_VD = tokens.roll(-1, 1), decoder.output_weight
    with torch.autocast("cpu", BFLOAT16):
        x_BLD = decoder.hidden(tokens).detach().to(BFLOAT16).requires_grad_()
        decoder.loss.logprobs(x_BLD, weight_VD, labels_BL).sum().backward()
    x64, weight64 = x_BLD.detach().double().requires_grad_(), weight_VD.detach().to(BFLOAT16).double().requires_grad_()
    (x64 @ weight64.T).log_softmax(-1).gather(2, labels_BL[..., None]).sum().backward()
    for gradient, true in ((x_BLD.grad, x64.grad), (weight_VD.grad, weight64.grad)):
        assert largest(gradient, true) < 0.02 * float(true.abs().max())
