"""The train section: keys that say nothing of what was chosen are refused, and patterns find names."""

import pytest

from headway.errors import RecipeError
from headway.recipe import Data, Recipe, Train, to_toml, with_settings
from headway.recipe.load import load_recipe, parse_recipe
from headway.recipe.patterns import first_match, matched, matches

BASE = Recipe(data=Data(path="d"))
HALF = ['train.weights="bfloat16"', 'train.dtype="bfloat16"']

REFUSED = [
    (["train.momentum=0.9"], "train.momentum has no effect with adamw"),
    (["train.optimizer=adafactor", "train.beta2=0.99"], "train.beta2 has no effect with adafactor"),
    (["train.optimizer=adafactor", "train.moments=bfloat16"], "train.moments has no effect with adafactor"),
    (["train.optimizer=adamw-8bit", "train.moments=bfloat16"], "train.moments has no effect with adamw-8bit"),
    (["train.master=true"], "train.master has no effect with float32 weights"),
    (["train.decay_steps=9"], "train.decay_steps has no effect with a cosine schedule"),
    (["train.weights=bfloat16"], 'needs dtype = "bfloat16"'),
    (["train.optimizer=muon", "train.offload_optimizer=true"], "needs float32 adamw, but optimizer is muon"),
    (["train.offload_optimizer=true", "train.moments=bfloat16"], "moments is bfloat16"),
    (["train.schedule=wsd", "train.steps=10", "train.warmup_steps=5", "train.decay_steps=6"], "exceed steps"),
    (["train.optimizer=adam"], "train.optimizer = 'adam'"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_settings_without_effect_are_refused(settings: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        with_settings(BASE, settings)


def test_derived_train_fields_are_filled_in() -> None:
    assert with_settings(BASE, ["train.optimizer=muon"]).train.momentum == 0.95
    assert BASE.train.momentum is None
    wsd = with_settings(BASE, ["train.schedule=wsd", "train.steps=300"]).train
    assert (wsd.decay_steps, wsd.decay) == (30, "sqrt")


@pytest.mark.parametrize(
    "settings", [["train.optimizer=muon"], ["train.schedule=wsd"], [*HALF, "train.master=true"], []]
)
def test_resolved_recipe_round_trips(settings: list[str], tmp_path) -> None:
    groups = 'train.groups=[{match=["embed.*"], rate=0.5}, {match=["**.bias"], weight_decay=0.0}]'
    resolved = with_settings(BASE, [*settings, groups, "train.batch_ramp=[[5, 64]]"])
    assert parse_recipe(resolved.model_dump(), {}, "again") == resolved
    file = tmp_path / "r.toml"
    file.write_text(to_toml(resolved))
    assert load_recipe(file) == resolved
    assert Recipe.model_validate_json(resolved.model_dump_json()) == resolved


NAMES = ["embed.weight", "layers.0.attention.q.weight", "layers.10.attention.q.bias", "layers.0.mlp.up.weight", "head"]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("embed.weight", [0]),
        ("embed.*", [0]),
        ("layers.*.attention.q.*", [1, 2]),
        ("layers.*", []),
        ("layers.**", [1, 2, 3]),
        ("**", [0, 1, 2, 3, 4]),
        ("**.weight", [0, 1, 3]),
        ("layers.1*.**", [2]),
        ("layers.0.**.weight", [1, 3]),
        ("embed", []),
        ("*", [4]),
    ],
)
def test_star_matches_one_part_and_two_match_any_number(pattern: str, wanted: list[int]) -> None:
    assert [i for i, name in enumerate(NAMES) if matches(pattern, name)] == wanted


def test_first_match_wins_and_unmatched_pattern_lists_similar_names() -> None:
    assert first_match([["head"], ["layers.**", "embed.*"], ["**"]], "embed.weight") == 1
    assert first_match([["head"]], "embed.weight") is None
    assert matched("train.freeze", ["head", "embed.*"], NAMES) == {"head", "embed.weight"}
    with pytest.raises(
        RecipeError, match=r"train\.freeze: no parameter of the model matches .layers\.\*\.attn\.q\.weight"
    ) as caught:
        matched("train.freeze", ["layers.*.attn.q.weight"], NAMES)
    assert "layers.*.attention.q.weight" in (caught.value.hint or "")


def test_unknown_key_of_parameter_group_is_named() -> None:
    with pytest.raises(RecipeError, match=r"train\.groups\.0"):
        with_settings(BASE, ['train.groups=[{match=["a"], lr=0.5}]'])
    with pytest.raises(ValueError, match="at least 1 item"):
        Train(groups=[{"match": []}])
