"""Every family against `transformers`: what all of them are held to. What is one's own is in its own file."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from family_cases import Case, assert_cache, assert_comes_back, assert_counts, assert_equal, assert_generates, make

from headway.models import empty_decoder
from headway.models.families import DECODERS
from headway.plan.architecture import cache_widths
from headway.recipe.families import FAMILIES, MODEL_TYPES
from headway.recipe.huggingface import model_from_config
from lazy_imports import transformers

FILES = sorted(Path(__file__).parent.glob("test_family_*.py"))
CASES: list[Case] = [case for file in FILES for case in importlib.import_module(file.stem).CASES]

VARIANTS = {
    "DeepSeek-V3, plain", "GPT-NeoX, YaRN", "Gemma 2, no caps", "Gemma, untied", "Mixtral, window", "OLMo 2, tied",
    "Qwen2.5, YaRN", "Qwen3-MoE, dense layers", "SmolLM2", "gpt-oss, plain positions",
}  # fmt: skip
"""Slow: each of their features is another case's too."""


@dataclass(frozen=True)
class Saved:
    """A model of `transformers`, and the folder that it is saved in."""

    case: Case
    folder: Path
    hf_model: Any


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in VARIANTS else ()) for case in CASES
    ],
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("theirs")
    return Saved(request.param, folder, make(request.param, folder))


def test_every_family_has_a_module_and_a_case() -> None:
    assert FAMILIES.keys() == DECODERS.keys() == {case.family for case in CASES}
    assert {case.name for case in CASES} >= VARIANTS
    assert {kind.model_fields["family"].default for kind in MODEL_TYPES.values()} <= FAMILIES.keys()


def test_logits_and_gradients(saved: Saved) -> None:
    assert_equal(saved.case, saved.folder, saved.hf_model)


def test_counts(saved: Saved) -> None:
    assert_counts(saved.case, saved.folder, saved.hf_model)


def test_there_and_back(saved: Saved, tmp_path: Path) -> None:
    assert_comes_back(saved.case, saved.folder, saved.hf_model, tmp_path / "ours")


GENERATES = {"Llama 3", "Gemma 3", "DeepSeek-V3", "gpt-oss", "Phi-3, long"}
"""Generated with by default: full attention, windows with two rotary tables, latent vectors, sinks, longrope."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c.name in GENERATES else pytest.mark.slow) for c in CASES]
)
def test_generates_as_transformers(case: Case, tmp_path: Path) -> None:
    assert_generates(case, tmp_path)


def test_cases_that_generate_exist() -> None:
    assert {case.name for case in CASES} >= GENERATES


def test_in_pieces_with_a_cache(saved: Saved) -> None:
    assert_cache(saved.case, saved.folder, saved.hf_model)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_know_what_the_cache_holds(case: Case) -> None:
    model = model_from_config(getattr(transformers, case.config)(**case.settings).to_dict())
    assert cache_widths(model.architecture()) == empty_decoder(model, "meta").cache_widths()
