import tomllib
from pathlib import Path

import pytest

from headway.errors import RecipeError
from headway.recipe import Recipe, check_resumable, load_recipe, to_toml, with_settings
from headway.recipe.upgrade import upgrade_recipe

NAMED = """
[data]
seq = 64
[data.mixture.web]
path = "data/web"
weight = 0.7
[data.mixture.code]
path = "data/code"
weight = [[1, 0.3], [1000, 0.5]]
"""
LISTED = """
[data]
seq = 64
[[data.mixture]]
path = "data/web"
weight = 0.7
[[data.mixture]]
path = "data/code"
weight = [[1, 0.3], [1000, 0.5]]
"""


def loaded(tmp_path, text, settings=()):
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return load_recipe(file, settings)


def test_mixture_table_and_list_are_equivalent(tmp_path):
    named, listed = loaded(tmp_path, NAMED), loaded(tmp_path, LISTED)
    assert named == listed
    assert list(named.data.parts) == ["web", "code"]
    assert [named.data.mixture["code"].weight_at(step) for step in (1, 999, 1000, 5000)] == [0.3, 0.3, 0.5, 0.5]
    assert named.data.changes == [1, 1000]


def test_mixture_round_trips_as_toml_and_json(tmp_path):
    recipe = loaded(tmp_path, NAMED)
    assert loaded(tmp_path, to_toml(recipe)) == recipe
    assert upgrade_recipe(tomllib.loads(to_toml(recipe))) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_single_dataset_is_written_without_mixture_keys():
    recipe = Recipe.model_validate({"data": {"path": "data/text"}})
    assert "mixture" not in recipe.model_dump()["data"]
    assert "path" not in with_settings(recipe, ["data.path=", 'data.mixture.a.path="x"']).model_dump()["data"]
    assert {name: part.path for name, part in recipe.data.parts.items()} == {"text": "data/text"}


def test_settings_and_variants_change_one_dataset_of_a_mixture(tmp_path):
    assert loaded(tmp_path, NAMED, ["data.mixture.web.weight=2"]).data.mixture["web"].weight == 2.0
    (tmp_path / "base.toml").write_text(NAMED)
    variant = 'extends = "base.toml"\n[data.mixture.books]\npath = "data/books"\n'
    assert list(loaded(tmp_path, variant).data.parts) == ["web", "code", "books"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\npath = "x"\n[data.mixture.a]\npath = "y"', "exclude each other"),
        ("[data]\nseq = 3", "data.path is missing"),
        ('[data.mixture.a]\npath = "x"\nweight = 0', "all weights of the mixture are 0 from step 1 on"),
        ('[data.mixture.a]\npath = "x"\nweight = [[0, 1], [5, 0]]', "all weights of the mixture are 0 from step 5 on"),
        ('[data.mixture.a]\npath = "x"\nweight = [[2, 1]]', "must start at step 1"),
        ('[data.mixture.a]\npath = "x"\nweight = [[1, 1], [9, 2], [9, 3]]', "step 9 is not after step 9"),
        ('[data.mixture.a]\npath = "x"\nweight = [[0, 1], [1, 2]]', "step 1 is not after step 1"),
        (
            '[data.mixture.a]\npath = "x"\nweight = -1',
            "data.mixture.a.weight: expected a number of at least 0 or [step, weight] pairs, got -1",
        ),
        ('[data.mixture."a b"]\npath = "x"', "data.mixture.a b"),
        ("[data.mixture.a]\nweight = 1", "data.mixture.a.path is missing"),
        ('[data.mixture.a]\npath = "x"\nwieght = 1', 'has no key "wieght"'),
        ('[[data.mixture]]\npath = "u/x"\n[[data.mixture]]\npath = "v/x"', "two datasets of the mixture are named x"),
    ],
)
def test_invalid_mixtures_are_refused(tmp_path, text, message):
    with pytest.raises(RecipeError) as error:
        loaded(tmp_path, text)
    assert message in error.value.message


def test_dataset_paths_may_change_on_resume_but_weights_may_not(tmp_path):
    recipe = loaded(tmp_path, NAMED)
    moved = with_settings(recipe, ['data.mixture.web.path="elsewhere/web"'])
    assert check_resumable(recipe, moved) == {"data.mixture.web.path": ("data/web", "elsewhere/web")}
    for setting in (
        "data.mixture.web.weight=0.6",
        'data.mixture.new.path="x"',
        'data.mixture.web.version="0123456789"',
    ):
        with pytest.raises(RecipeError, match="cannot change when a run is resumed"):
            check_resumable(recipe, with_settings(recipe, [setting]))


def test_mixture_replaces_dataset_of_extended_recipe(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[data]\npath = "one"\nversion = "0123456789"\nseq = 64\n')
    (tmp_path / "two.toml").write_text('extends = "one.toml"\n[data.mixture.a]\npath = "x"\n')
    (tmp_path / "three.toml").write_text('extends = "two.toml"\n[data]\npath = "again"\n')
    mixed, again = load_recipe(tmp_path / "two.toml").data, load_recipe(tmp_path / "three.toml").data
    assert (mixed.path, mixed.version, [*mixed.parts], mixed.seq) == (None, None, ["a"], 64)
    assert (again.path, again.version, not again.mixture, again.seq) == ("again", None, True, 64)
