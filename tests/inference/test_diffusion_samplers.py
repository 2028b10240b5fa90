"""Samplers against solutions in closed form."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from headway.inference.diffusion_samplers import ddim, euler, flow_times, guided, heun
from headway.models.noising import DdpmPath
from headway.recipe.diffusion import Ddpm

NOISE = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MEAN, STD = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor([0.3, 1.0, 1.7], dtype=torch.float64)


def velocity_of_gaussian(x, t):
    """E[noise - data | x_t = x] for data of N(MEAN, STD^2): what a perfect model predicts."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    centered = x - (1 - t) * MEAN
    return t / variance * centered - MEAN - (1 - t) * STD**2 / variance * centered


@pytest.mark.parametrize(("method", "order"), [(euler, 1), (heun, 2)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_samplers_converge_to_the_exact_solution_at_their_order(method, order: int, shift: float) -> None:
    """The flow of Gaussian data is linear: noise z ends at MEAN + STD z."""
    errors = [
        float((method(velocity_of_gaussian, NOISE, flow_times(steps, shift)) - (MEAN + STD * NOISE)).abs().max())
        for steps in (64, 128, 256)
    ]
    assert errors[-1] < (0.06 if order == 1 else 2e-3)
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("predict", ["epsilon", "v"])
def test_ddim_ends_where_the_exact_solution_of_gaussian_data_does(predict: str) -> None:
    """The probability flow maps noise z to MEAN + STD z, up to the noise that is left at the schedule's last step."""
    path = DdpmPath(Ddpm(kind="ddpm", predict=predict, betas="cosine", steps=1000))

    def perfect(x, t):
        alpha, sigma = (float(scale[0]) for scale in path.scales(np.array([t])))
        variance = alpha**2 * STD**2 + sigma**2
        epsilon = sigma / variance * (x - alpha * MEAN)
        data = MEAN + alpha * STD**2 / variance * (x - alpha * MEAN)
        return epsilon if predict == "epsilon" else alpha * epsilon - sigma * data

    got = ddim(perfect, NOISE, path, 1000)
    torch.testing.assert_close(got, MEAN + STD * NOISE, rtol=0.02, atol=0.03)


def predict_any(x, t):
    return torch.tanh(1.3 * x + 0.7 * t) - 0.2 * x


def test_guidance_moves_away_from_the_unconditional_prediction() -> None:
    x = NOISE.float()
    predict = guided(predict_any, lambda x, t: x * t, 3.0)
    torch.testing.assert_close(predict(x, 0.4), 3.0 * predict_any(x, 0.4) - 2.0 * x * 0.4)
    assert guided(predict_any, predict, 1.0) is predict_any
