import json

import pytest
from pydantic import ValidationError

from headway.agent.launch.branch import recipe_of_checkpoint
from headway.recipe import Recipe, with_settings
from headway.recipe.upgrade import upgrade_recipe
from headway.track import RunFolder, read_recipe

OLD = {"name": "old", "data": {"path": "data/text", "seq": 64, "mask_boundaries": True}}
"""As a Headway wrote it that knew no `within_documents`."""


def test_old_recipe_keeps_former_behaviour_and_new_one_gets_new_default():
    assert Recipe.model_validate(OLD).data.within_documents is True
    assert upgrade_recipe(OLD).data.within_documents is False
    assert upgrade_recipe(OLD).data.mask_boundaries is True
    assert "within_documents" not in OLD["data"]


@pytest.mark.parametrize("given", [True, False])
def test_explicit_keys_of_old_recipe_are_kept(given):
    recipe = Recipe.model_validate({**OLD, "data": {**OLD["data"], "within_documents": given}})
    assert upgrade_recipe(recipe.model_dump()) == recipe
    assert upgrade_recipe(json.loads(recipe.model_dump_json())) == recipe


def test_run_recipe_is_upgraded_and_keeps_its_meaning_when_rewritten(tmp_path):
    run = RunFolder(tmp_path)
    run.recipe_file.write_text(json.dumps(OLD))
    recipe = read_recipe(run)
    assert recipe.data.within_documents is False
    run.recipe_file.write_text(with_settings(recipe, ["train.steps=7", "train.warmup_steps=0"]).model_dump_json())
    assert read_recipe(run).data.within_documents is False
    assert read_recipe(run).train.steps == 7


def test_checkpoint_recipe_is_upgraded(monkeypatch):
    class Opened:
        class manifest:  # noqa: N801
            recipe = OLD

    monkeypatch.setattr("headway.agent.launch.branch.open_address", lambda address: Opened)
    assert recipe_of_checkpoint("anywhere").data.within_documents is False


@pytest.mark.parametrize("wrong", [None, 3, [], {}, {"data": 3}, {"data": None}])
def test_invalid_stored_recipe_is_left_to_validation(wrong):
    with pytest.raises(ValidationError):
        upgrade_recipe(wrong)
