"""`train.epochs` beside `train.steps`."""

import pytest

from headway.errors import RecipeError
from headway.recipe import Recipe, load_recipe, to_toml, with_settings
from headway.recipe.train import Train


def write(tmp_path, train):
    path = tmp_path / "r.toml"
    path.write_text(f'[data]\npath = "d"\n[train]\n{train}\n')
    return path


def test_epochs_exclude_steps_and_steps_can_be_unset(tmp_path):
    path = write(tmp_path, "steps = 5")
    with pytest.raises(RecipeError, match="steps and epochs exclude each other"):
        load_recipe(path, ["train.epochs=2"])
    assert load_recipe(path, ["train.steps=", "train.epochs=2"]).train.epochs == 2


def test_a_recipe_with_epochs_survives_toml_and_settings(tmp_path):
    recipe = load_recipe(write(tmp_path, "epochs = 1.5\nschedule = 'wsd'"))
    assert "steps" not in recipe.model_dump()["train"]
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
    assert with_settings(recipe, ["seed=3"]).train == recipe.train


def test_what_follows_from_steps_is_derived_when_they_are_known():
    train = Train(epochs=3, schedule="wsd", lr=1e-3)
    known = train.with_steps(300)
    assert (known.epochs, known.steps, known.warmup_steps, known.decay_steps) == (None, 300, 30, 30)
    assert known == Train(steps=300, schedule="wsd", lr=1e-3)
    assert Train(epochs=3, warmup_steps=7).with_steps(300).warmup_steps == 7
    assert "epochs" not in Recipe.model_validate({"data": {"path": "d"}}).model_dump()["train"]
