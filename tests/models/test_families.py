"""Every family against `transformers`: what all of them are held to. What is one's own is in its own file."""

import importlib
from pathlib import Path

import pytest
from family_cases import Case, assert_cache, assert_counts, assert_equal, assert_round_trip

from headway.models.families import DECODERS
from headway.recipe.families import FAMILIES, MODEL_TYPES

FILES = sorted(Path(__file__).parent.glob("test_family_*.py"))
CASES: list[Case] = [case for file in FILES for case in importlib.import_module(file.stem).CASES]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_family_has_a_module_and_a_case() -> None:
    assert FAMILIES.keys() == DECODERS.keys() == {case.family for case in CASES}
    assert {kind.model_fields["family"].default for kind in MODEL_TYPES.values()} <= FAMILIES.keys()


@every
def test_logits_and_gradients(case: Case, tmp_path: Path) -> None:
    assert_equal(case, tmp_path)


@every
def test_counts(case: Case, tmp_path: Path) -> None:
    assert_counts(case, tmp_path)


@every
def test_there_and_back(case: Case, tmp_path: Path) -> None:
    assert_round_trip(case, tmp_path)


@every
def test_a_token_at_a_time(case: Case, tmp_path: Path) -> None:
    assert_cache(case, tmp_path)
