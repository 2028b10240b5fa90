"""Samplers against solutions in closed form, and against diffusers' schedulers."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

from headway.inference.diffusion_samplers import ddim, ddim_indices, euler, flow_times, guided, heun
from headway.models.noising import DdpmPath, FlowPath
from headway.recipe.diffusion import Ddpm, Flow

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
    for coarse, fine in zip(errors[:-1], errors[1:], strict=True):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


def model(x, t):
    """Any smooth prediction of a sample and a time."""
    return torch.tanh(1.3 * x + 0.7 * t) - 0.2 * x


@pytest.mark.parametrize("shift", [1.0, 2.5])
def test_euler_is_that_of_diffusers(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 12, 12).tolist())
    x = NOISE.float()
    for time in scheduler.timesteps:
        x = scheduler.step(model(x, float(time) / 1000), time, x, return_dict=False)[0]
    torch.testing.assert_close(euler(model, NOISE.float(), flow_times(12, shift)), x, rtol=1e-5, atol=1e-5)


def test_dynamic_shift_is_that_of_diffusers() -> None:
    """Which states it as its logarithm."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    recipe = Flow(kind="flow", shift=2.0, shift_tokens=1024)
    path = FlowPath(recipe, tokens=4096)
    assert path.shift == 4.0
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 9, 9).tolist(), mu=math.log(path.shift))
    np.testing.assert_allclose(flow_times(9, path.shift), scheduler.sigmas.numpy(), atol=1e-6)


def test_heun_is_that_of_diffusers() -> None:
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(10)
    x = NOISE.float()
    for time in scheduler.timesteps:
        x = scheduler.step(model(x, float(time) / 1000), time, x, return_dict=False)[0]
    times = torch.unique(scheduler.sigmas).flip(0).double().numpy()  # each but the ends is there twice
    torch.testing.assert_close(_heun_with_a_last_euler_step(times), x, rtol=1e-4, atol=1e-4)


def _heun_with_a_last_euler_step(times):
    x = heun(model, NOISE.float(), times[:-1])
    return euler(model, x, times[-2:])


@pytest.mark.parametrize("predict", ["epsilon", "v"])
@pytest.mark.parametrize("betas", ["linear", "scaled-linear", "cosine"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_ddim_is_that_of_diffusers(predict: str, betas: str, clip: float | None) -> None:
    names = {"linear": "linear", "scaled-linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
    range_of = {"scaled-linear": {"beta_start": 0.00085, "beta_end": 0.012}}.get(betas, {})
    scheduler = DDIMScheduler(
        beta_schedule=names[betas], prediction_type={"epsilon": "epsilon", "v": "v_prediction"}[predict],
        timestep_spacing="trailing", clip_sample=clip is not None, **range_of,
    )  # fmt: skip
    scheduler.set_timesteps(20)
    path = DdpmPath(Ddpm(kind="ddpm", predict=predict, betas=betas))
    assert ddim_indices(1000, 20) == scheduler.timesteps.tolist()
    np.testing.assert_allclose(path.alphas, scheduler.alphas_cumprod.double().numpy(), rtol=2e-4, atol=1e-7)
    x = NOISE.float()
    for time in scheduler.timesteps:
        x = scheduler.step(model(x, float(time) / 1000), time, x, use_clipped_model_output=True).prev_sample
    rtol = 2e-2 if betas == "cosine" else 1e-3  # its first alphas are 1e-9 there, in float32
    torch.testing.assert_close(ddim(model, NOISE.float(), path, 20, clip=clip), x, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_ancestral_sampling_is_ddpm_of_diffusers(monkeypatch, clip: float | None) -> None:
    """All steps of the schedule, with the same noise."""
    scheduler = DDPMScheduler(num_train_timesteps=50, clip_sample=clip is not None)
    scheduler.set_timesteps(50)
    noises = [torch.randn(NOISE.shape, generator=torch.Generator().manual_seed(n)) for n in range(50)]
    rest = iter(noises)
    monkeypatch.setattr("diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **__: next(rest))
    x = NOISE.float()
    for time in scheduler.timesteps:
        x = scheduler.step(model(x, float(time) / 50), time, x).prev_sample
    path = DdpmPath(Ddpm(kind="ddpm", steps=50))
    got = ddim(model, NOISE.float(), path, 50, eta=1.0, noise=noises.__getitem__, clip=clip)
    torch.testing.assert_close(got, x, rtol=1e-3, atol=1e-3)


def test_guidance_moves_away_from_the_unconditional_prediction() -> None:
    x = NOISE.float()
    predict = guided(model, lambda x, t: x * t, 3.0)
    torch.testing.assert_close(predict(x, 0.4), 3.0 * model(x, 0.4) - 2.0 * x * 0.4)
    assert guided(model, predict, 1.0) is model
