"""Generated samples depend on seed and number alone; conditions that a model does not have are refused."""

from pathlib import Path

import pytest
import torch

from headway.errors import ModelError
from headway.inference.diffusion import Generator, SamplingSettings
from headway.inference.load import load_run
from headway.models import init_weights
from headway.models.diffusion import Conditioning, empty_transformer
from headway.recipe.diffusion import Ddpm, Flow
from headway.recipe.families.dit import DiT
from headway.recipe.load import load_recipe
from headway.track import RunFolder

MODEL = DiT(family="dit", in_channels=3, patch=2, layers=1, dim=16, heads=2, num_classes=3)


@pytest.fixture(scope="module")
def module():
    module = empty_transformer(MODEL)
    init_weights(module, 0)
    with torch.no_grad():  # its head is zero at first, and so would be every prediction
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def generator_of(module, objective=None) -> Generator:
    return Generator(MODEL, objective or Flow(kind="flow"), module, None, torch.device("cpu"))


@pytest.mark.parametrize("sampler", ["euler", "heun", "ddim", "ancestral"])
def test_a_sample_is_the_same_in_any_batch(module, sampler: str) -> None:
    """Also the noise that ancestral sampling adds."""
    objective = Flow(kind="flow") if sampler in ("euler", "heun") else Ddpm(kind="ddpm", steps=50)
    generator, settings = generator_of(module, objective), SamplingSettings(4, 2.0, seed=3, sampler=sampler)
    whole = generator.generate([0, 1, 2, 1], (1, 4, 6), settings)
    assert whole.shape == (4, 3, 1, 4, 6)
    torch.testing.assert_close(generator.generate([2, 1], (1, 4, 6), settings, first=2), whole[2:])
    other = generator.generate([0, 1, 2, 1], (1, 4, 6), SamplingSettings(4, 2.0, seed=4, sampler=sampler))
    assert not torch.isclose(other, whole).any(dim=1).all()


def test_guidance_of_one_is_the_conditional_model_alone(module) -> None:
    """And the model sees the time of each step, with the class of each sample."""
    seen = list[tuple[float, list[int]]]()

    def predict(x: torch.Tensor, times: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        seen.append((float(times[0]), conditioning.labels_B.tolist()))
        return module(x, times, conditioning)

    generator_of(predict).generate([2, 0], (1, 4, 4), SamplingSettings(2, 1.0))
    assert seen == [(1.0, [2, 0]), (0.5, [2, 0])]
    seen.clear()
    generator_of(predict).generate([2, 0], (1, 4, 4), SamplingSettings(1, 3.0))
    assert seen == [(1.0, [3, 3]), (1.0, [2, 0])]


def test_classes_that_the_model_does_not_have_are_refused(module) -> None:
    with pytest.raises(ModelError, match="there is no class 3"):
        generator_of(module).generate([3], (1, 4, 4), SamplingSettings(1, 1.0))


def test_a_diffusion_model_is_not_served_as_text(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "digits")
    run.path.mkdir()
    recipe = load_recipe(Path(__file__).resolve().parents[2] / "recipes" / "images.toml")
    run.recipe_file.write_text(recipe.model_dump_json())
    with pytest.raises(ModelError, match="digits is a diffusion model") as raised:
        load_run(run, tmp_path / "none")
    assert "headway sample" in str(raised.value.hint)
