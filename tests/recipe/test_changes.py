"""What a resumed run may change."""

import pytest

from headway.errors import RecipeError
from headway.recipe import CHANGEABLE, Data, Recipe, changes, check_resumable, with_settings
from headway.recipe.load import _fields

BASE = Recipe(data=Data(path="d"))


def test_changes_are_found_by_dotted_key() -> None:
    new = with_settings(BASE, ["train.steps=2000", "checkpoint.keep_last=5"])
    assert changes(BASE, new) == {"train.steps": (1000, 2000), "checkpoint.keep_last": (2, 5)}
    assert check_resumable(BASE, new) == changes(BASE, new)


@pytest.mark.parametrize("setting", ["seed=9", "train.lr=1e-5", "train.batch=64", "model.layers=5", "data.seq=8"])
def test_what_would_make_another_run_is_refused_by_name(setting: str) -> None:
    with pytest.raises(RecipeError, match=setting.split("=")[0]) as caught:
        check_resumable(BASE, with_settings(BASE, [setting]))
    assert "train.steps" in (caught.value.hint or "")


def test_the_list_names_real_keys() -> None:
    assert set(CHANGEABLE) <= {key for key, _ in _fields(Recipe)}


def test_a_section_that_is_left_out_counts_as_its_defaults() -> None:
    meshed = with_settings(BASE, ["parallel.shard=2"])
    assert changes(BASE, meshed) == {"parallel.shard": (None, 2)}
    assert changes(meshed, with_settings(meshed, ["parallel="])) == {"parallel.shard": (2, None)}
    assert changes(BASE, with_settings(BASE, ["parallel.tensor=1"])) == {}
    with pytest.raises(RecipeError, match=r"parallel\.tensor cannot change"):
        check_resumable(BASE, with_settings(BASE, ["parallel.tensor=2"]))
