"""Numbers gone wrong, as a recipe speaks of them."""

import json
import tomllib

import pytest

from headway.errors import RecipeError
from headway.recipe import Data, Recipe, check_resumable, to_toml, with_settings
from headway.recipe.load import parse_recipe
from headway.recipe.schema import Health

BASE = Recipe(data=Data(path="d"))
SETTINGS = [
    "data.skip=[[96, 104], [104, 110]]",
    "train.rate_cuts=[[40, 0.5], [40, 0.25]]",
    "health.if_spike=skip",
    "health.spike_z=0",
    "health.compare_every_steps=0",
]


def test_health_defaults_only_monitor() -> None:
    assert BASE.health == Health(
        spike_z=50.0,
        spike_window=64,
        if_not_finite="stop",
        if_spike="go-on",
        rate_factor=0.5,
        compare_every_steps=100,
    )
    assert (BASE.data.skip, BASE.train.rate_cuts) == ((), ())


def test_health_section_round_trips() -> None:
    recipe = with_settings(BASE, SETTINGS)
    assert recipe.data.skip == ((96, 104), (104, 110))
    assert recipe.train.rate_cuts == ((40, 0.5), (40, 0.25))
    assert parse_recipe(tomllib.loads(to_toml(recipe)), {}, "toml") == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_older_recipe_gets_health_defaults() -> None:
    old = json.loads(BASE.model_dump_json())
    del old["health"], old["data"]["skip"], old["train"]["rate_cuts"]
    assert Recipe.model_validate(old) == BASE


def test_health_may_change_on_resume() -> None:
    new = with_settings(BASE, SETTINGS)
    assert check_resumable(BASE, new) == {
        "data.skip": ((), ((96, 104), (104, 110))),
        "train.rate_cuts": ((), ((40, 0.5), (40, 0.25))),
        "health.if_spike": ("go-on", "skip"),
        "health.spike_z": (50.0, 0.0),
        "health.compare_every_steps": (100, 0),
    }
    for key in Health.model_fields:
        other = {"if_not_finite": "skip", "if_spike": "stop", "rate_factor": 0.1}.get(key, 7)
        assert set(check_resumable(BASE, with_settings(BASE, [f"health.{key}={other}"]))) == {f"health.{key}"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.skip=[[8, 8]]", r"data.skip: \[8, 8\] is empty"),
        ("data.skip=[[9, 8]]", r"data.skip: \[9, 8\] is empty"),
        ("data.skip=[[8, 16], [15, 20]]", r"\[15, 20\] overlaps the previous range, which ends at 16"),
        ("data.skip=[[8, 16], [0, 4]]", r"\[0, 4\] overlaps the previous range"),
        ("data.skip=[[-1, 16]]", r"data.skip.0.0 = -1"),
        ("data.skip=[[1, 2, 3]]", r"data.skip.0 = "),
        ("data.skip=[[1.5, 2]]", r"data.skip.0.0 = 1.5"),
        ("train.rate_cuts=[[0, 0.5]]", r"train.rate_cuts.0.0 = 0"),
        ("train.rate_cuts=[[4, 0]]", r"train.rate_cuts.0.1 = 0"),
        ("train.rate_cuts=[[4, 1.5]]", r"train.rate_cuts.0.1 = 1.5"),
        ("health.spike_z=-1", r"health.spike_z = -1"),
        ("health.spike_window=0", r"health.spike_window = 0"),
        ("health.if_not_finite=go-on", r"health.if_not_finite = 'go-on'"),
        ("health.rate_factor=1", r"health.rate_factor = 1"),
        ("health.compare_every_steps=-1", r"health.compare_every_steps = -1"),
    ],
)
def test_invalid_health_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        with_settings(BASE, [setting])
