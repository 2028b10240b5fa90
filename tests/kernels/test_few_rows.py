"""Products of few rows in inference equal the plain ones; training has the plain ones."""

import pytest
import torch
from torch import nn

from headway.kernels import few_rows
from headway.models.layers import Linear


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 6), (1, 13), (2, 8), (64,), (3, 2, 5)])
def test_values_are_those_of_float64_products(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, bias_O = noise(*shape, 48), noise(70, 48, seed=1), noise(70, seed=2) if bias else None
    expected = nn.functional.linear(x.double(), weight.double(), None if bias_O is None else bias_O.double())
    y = few_rows.linear(x, weight, bias_O)
    assert y.shape == (*shape, 70)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_only_few_float32_rows_in_inference_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    weight = noise(70, 48)
    few, many, one = noise(1, 8, 48), noise(1, few_rows.MOST + 1, 48), noise(1, 1, 48)
    with torch.inference_mode():
        assert few_rows.takes(few, weight)
        assert not few_rows.takes(many, weight)
        assert not few_rows.takes(one, weight)
        assert not few_rows.takes(few.bfloat16(), weight.bfloat16())
        assert not few_rows.takes(few.to("meta"), weight.to("meta"))
    with torch.no_grad():
        assert not few_rows.takes(few, weight)
    assert not few_rows.takes(few, weight)


def test_a_layer_computes_the_same_in_training_and_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    layer, x = Linear(48, 70), noise(1, 8, 48)
    with torch.no_grad():
        layer.weight.copy_(noise(70, 48, seed=1))
        assert layer.bias is not None
        layer.bias.copy_(noise(70, seed=2))
    trained = layer(x)
    assert torch.equal(trained, nn.functional.linear(x, layer.weight, layer.bias))
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), trained.detach(), rtol=1e-5, atol=1e-5)
