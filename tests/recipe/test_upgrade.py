import json

import pytest
from pydantic import ValidationError

from headway.agent.launch.prepare import recipe_of_checkpoint
from headway.recipe import Recipe, with_settings
from headway.recipe.upgrade import upgrade_recipe
from headway.track import RunFolder, read_recipe

OLD = {"name": "old", "data": {"path": "data/text", "seq": 64, "mask_boundaries": True}}
"""As a Headway wrote it that knew no `within_documents`."""


def test_an_old_recipe_goes_on_as_it_was_trained_and_a_new_one_gets_the_new_default():
    assert Recipe.model_validate(OLD).data.within_documents is True
    assert upgrade_recipe(OLD).data.within_documents is False
    assert upgrade_recipe(OLD).data.mask_boundaries is True
    assert "within_documents" not in OLD["data"]


@pytest.mark.parametrize("said", [True, False])
def test_what_a_recipe_says_itself_is_kept(said):
    recipe = Recipe.model_validate({**OLD, "data": {**OLD["data"], "within_documents": said}})
    assert upgrade_recipe(recipe.model_dump()) == recipe
    assert upgrade_recipe(json.loads(recipe.model_dump_json())) == recipe


def test_a_runs_file_is_read_as_stored_and_keeps_what_it_means_when_written_again(tmp_path):
    run = RunFolder(tmp_path)
    run.recipe_file.write_text(json.dumps(OLD))
    recipe = read_recipe(run)
    assert recipe.data.within_documents is False
    run.recipe_file.write_text(with_settings(recipe, ["train.steps=7", "train.warmup_steps=0"]).model_dump_json())
    assert read_recipe(run).data.within_documents is False
    assert read_recipe(run).train.steps == 7


def test_a_checkpoints_own_recipe_is_read_as_stored(monkeypatch):
    class Opened:
        class manifest:  # noqa: N801
            recipe = OLD

    monkeypatch.setattr("headway.agent.launch.prepare.open_address", lambda address: Opened)
    assert recipe_of_checkpoint("anywhere").data.within_documents is False


@pytest.mark.parametrize("wrong", [None, 3, [], {}, {"data": 3}, {"data": None}])
def test_mistakes_are_the_recipes_own_to_tell(wrong):
    with pytest.raises(ValidationError):
        upgrade_recipe(wrong)
