"""Samplers against diffusers' schedulers."""

import math

import numpy as np
import pytest
import torch

from headway.inference.diffusion_samplers import ddim, ddim_indices, euler, flow_times, heun
from headway.models.noising import DdpmPath, FlowPath
from headway.recipe.diffusion import Ddpm, Flow

pytestmark = pytest.mark.slow  # importing diffusers takes three CPU-seconds

NOISE = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def schedulers():
    import diffusers

    return diffusers


def model(x, t):
    """Any smooth prediction of a sample and a time."""
    return torch.tanh(1.3 * x + 0.7 * t) - 0.2 * x


@pytest.mark.parametrize("shift", [1.0, 2.5])
def test_euler_is_that_of_diffusers(schedulers, shift: float) -> None:
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 12, 12).tolist())
    x = NOISE.float()
    for time in scheduler.timesteps:
        x = scheduler.step(model(x, float(time) / 1000), time, x, return_dict=False)[0]
    torch.testing.assert_close(euler(model, NOISE.float(), flow_times(12, shift)), x, rtol=1e-5, atol=1e-5)


def test_dynamic_shift_is_that_of_diffusers(schedulers) -> None:
    """Which states it as its logarithm."""
    scheduler = schedulers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    recipe = Flow(kind="flow", shift=2.0, shift_tokens=1024)
    path = FlowPath(recipe, tokens=4096)
    assert path.shift == 4.0
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 9, 9).tolist(), mu=math.log(path.shift))
    np.testing.assert_allclose(flow_times(9, path.shift), scheduler.sigmas.numpy(), atol=1e-6)


def test_heun_is_that_of_diffusers(schedulers) -> None:
    scheduler = schedulers.FlowMatchHeunDiscreteScheduler()
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
def test_ddim_is_that_of_diffusers(schedulers, predict: str, betas: str, clip: float | None) -> None:
    names = {"linear": "linear", "scaled-linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
    range_of = {"scaled-linear": {"beta_start": 0.00085, "beta_end": 0.012}}.get(betas, {})
    scheduler = schedulers.DDIMScheduler(
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
def test_ancestral_sampling_is_ddpm_of_diffusers(schedulers, monkeypatch, clip: float | None) -> None:
    """All steps of the schedule, with the same noise."""
    scheduler = schedulers.DDPMScheduler(num_train_timesteps=50, clip_sample=clip is not None)
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
