"""Recipes from files, settings and Python."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import RecipeError
from headway.recipe import (
    Data,
    Model,
    ModelLayout,
    Parallel,
    Recipe,
    Train,
    load_recipe,
    nearest_keys,
    to_toml,
    with_settings,
)
from headway.recipe.documentation import recipe_schema
from thinned import examples

MINIMAL = '[data]\npath = "d"\n'


def write(folder: Path, text: str, name: str = "r.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.stepz=5"], '--set train.stepz=5: train has no key "stepz"'),
        (["train.lr=bad", "train.stepz=5"], '--set train.stepz=5: train has no key "stepz"'),
        (["train.batch=0"], "--set train.batch = 0: input should be greater than or equal to 1"),
        (["seed=3", "train.warmup_steps=-1"], "--set train.warmup_steps = -1: input should be greater than"),
        (["data.version=12345678"], "--set data.version = 12345678: this is no text"),
        # The key that is now wrong is in the file; what made it wrong is the setting.
        (["model.class=a.b:C"], "--set model.class=a.b:C: model.layers does not apply to a custom class"),
        (["seed=3", "model.family=gpt2"], "--set model.family=gpt2: model"),
        # Several settings are wrong: each mistake has its own.
        (["train.steps=2", "model.heads=5"], "--set model.heads=5: model: heads"),
        (["model.heads=5", "train.steps=2"], "--set model.heads=5: model: heads"),
        (["model.layers=3", "model.heads=5", "train.steps=2"], "--set model.heads=5: model: heads"),
        (["train.steps=2", "model.layers=3"], "--set train.steps=2: train: warmup_steps (9)"),
        (["objective.kind=dpo", "objective.beta=0.2", "objective.kind=ddpo"], "--set objective.kind=ddpo: unknown"),
    ],
)
def test_error_of_a_setting_names_the_option_and_not_the_file(tmp_path, settings, message) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        '[model]\nlayers = 2\nheads = 4\nkv_heads = 2\n[data]\npath = "d"\n[train]\nlr = 1e-3\nwarmup_steps = 9\n'
    )
    for load in (lambda: load_recipe(file, settings), lambda: with_settings(load_recipe(file), settings)):
        with pytest.raises(RecipeError) as caught:
            load()
        assert caught.value.message.startswith(message)
    file.write_text(file.read_text() + "stepz = 3\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["train.steps=3"])
    assert caught.value.message == f'{file}: train has no key "stepz"', "a mistake in the file is the file's"


def test_file_and_python_give_the_same_recipe(tmp_path: Path) -> None:
    file = write(tmp_path, 'name = "x"\n[model]\nlayers = 2\n[data]\npath = "d"\nseq = 64\n[train]\nlr = 1e-3\n')
    assert load_recipe(file) == Recipe(
        name="x", model=Model(layers=2), data=Data(path="d", seq=64), train=Train(lr=1e-3)
    )


def test_extends_changes_only_named_keys_and_settings_win(tmp_path: Path) -> None:
    write(tmp_path, '[data]\npath = "d"\nseq = 64\n[train]\nlr = 1e-3\nbatch = 4\n', "base.toml")
    (tmp_path / "sub").mkdir()
    file = write(tmp_path / "sub", 'extends = "../base.toml"\n[train]\nbatch = 8\n')
    recipe = load_recipe(file, ["train.lr=5e-4", "data.path=other place", "train.compile=true"])
    assert (recipe.data.seq, recipe.train.batch) == (64, 8)
    assert (recipe.train.lr, recipe.data.path, recipe.train.compile) == (5e-4, "other place", True)


def test_circular_extends_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"\n', "a.toml")
    write(tmp_path, 'extends = "a.toml"\n', "b.toml")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe(tmp_path / "a.toml")


def test_derived_fields_follow_given_ones() -> None:
    model = Model(dim=384, heads=6)
    assert (model.kv_heads, model.head_dim, model.hidden) == (6, 64, 1024)
    assert Model(dim=384, heads=6, hidden=100).hidden == 100
    assert Train(steps=50).warmup_steps == 5
    assert Train(steps=5000).warmup_steps == 100


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("train.learning_rate=1", 'train has no key "learning_rate"', "did you mean train.lr"),
        ("train.seq=4", 'train has no key "seq"', "data.seq"),
        ("train.batch_size=4", 'train has no key "batch_size"', "train.batch"),
        ("model.num_layers=4", 'model has no key "num_layers"', "model.layers"),
        ("trian.lr=1", 'a recipe has no key "trian"', "train"),
        ("train.batch=0", "train.batch = 0", "a whole number at least 1"),
        ("train.lr=20", "train.lr = 20", "a number above 0 and below 10"),
        ("train.lr=abc", "train.lr = 'abc'", "a number above 0"),
        ("train.dtype=fp4", "train.dtype = 'fp4'", "one of float32, bfloat16"),
        ("data.holdout=0.9", "data.holdout = 0.9", "below 0.5"),
        ("train.steps=true", "train.steps = True", "a whole number"),
        ("train.lr", "expected key=value", "train.lr=3e-4"),
        ("model.kv_heads=3", "heads (4) must be a multiple of kv_heads (3)", ""),
        ("train.warmup_steps=2000", "must be less than steps", ""),
    ],
)
def test_invalid_values_are_reported_with_allowed_range(tmp_path: Path, setting: str, message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [setting])
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert "--set" in caught.value.message


def test_error_in_extended_file_names_that_file(tmp_path: Path) -> None:
    base = write(tmp_path, '[train]\nbatchsize = 3\n[data]\npath = "d"\n', "base.toml")
    with pytest.raises(RecipeError, match="batchsize") as caught:
        load_recipe(write(tmp_path, 'extends = "base.toml"\n'))
    assert str(base) in caught.value.message


@pytest.mark.parametrize("text", ["[train\n", "x = \n", "\xff"])
def test_invalid_toml_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "r.toml"
    file.write_bytes(text.encode("latin1"))
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(file)


def test_missing_file_and_missing_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match=r"data\.path is missing"):
        load_recipe(write(tmp_path, 'name = "x"\n'))


@given(
    layers=st.integers(1, 100),
    lr=st.floats(1e-9, 9.9),
    path=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\r\n"), min_size=1),
    init=st.none() | st.just("some/folder"),
)
def test_toml_and_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, layers: int, lr: float, path: str, init: str | None
) -> None:
    recipe = Recipe(model=Model(layers=layers, init=init), data=Data(path=path), train=Train(lr=lr))
    file = tmp_path_factory.mktemp("r") / "r.toml"
    file.write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(file) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_settings_on_resolved_recipe_keep_other_keys() -> None:
    recipe = Recipe(data=Data(path="d"), train=Train(steps=100))
    longer = with_settings(recipe, ["train.steps=400"])
    assert longer.train.steps == 400
    assert longer.train.warmup_steps == recipe.train.warmup_steps == 10


def test_every_field_is_documented_in_json_schema() -> None:
    schema = json.loads(json.dumps(recipe_schema()))
    for section in (schema, *schema["$defs"].values()):
        for name, field in section["properties"].items():
            assert field.get("description") or "$ref" in field, name


def test_nearest_keys_of_nonsense_is_empty() -> None:
    assert nearest_keys("train.qqqqzzzz") == []


def test_empty_setting_unsets_a_key(tmp_path: Path) -> None:
    file = write(tmp_path, '[data]\npath = "d"\nversion = "0123456789"\n')
    assert load_recipe(file, ["data.version="]).data.version is None
    with pytest.raises(RecipeError, match=r"train\.lr = None"):
        load_recipe(file, ["train.lr="])


def test_parallel_section_is_optional(tmp_path: Path) -> None:
    file = write(tmp_path, '[data]\npath = "d"\n')
    assert load_recipe(file).parallel is None
    given = load_recipe(file, ["parallel.tensor=2"])
    assert given.parallel == Parallel(replicate=1, shard=None, tensor=2)
    again = tmp_path / "again.toml"
    for recipe in (given, load_recipe(file)):
        again.write_text(to_toml(recipe))
        assert load_recipe(again) == recipe
    assert nearest_keys("shards")[0] == "parallel.shard"
    with pytest.raises(RecipeError, match=r"parallel\.shard = 0") as caught:
        load_recipe(file, ["parallel.shard=0"])
    assert caught.value.hint == "parallel.shard takes a whole number at least 1"


OWN = """
[model]
class = "shapes.tiny:Tiny"
args = { width = 64, sizes = [1, 2], rate = 0.5, options = { "a key.with dots" = [{ b = "c" }], none = {} } }
[model.layout]
blocks = "blocks"
first = ["tok"]
columns = ["blocks.*.q", "blocks.*.k"]
[data]
path = "d"
"""
ARGS = {
    "width": 64,
    "sizes": [1, 2],
    "rate": 0.5,
    "options": {"a key.with dots": [{"b": "c"}], "none": {}},
}


def test_custom_class_from_file_and_from_python(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, OWN))
    layout = ModelLayout(blocks="blocks", first=("tok",), columns=("blocks.*.q", "blocks.*.k"))
    assert recipe.model == Model(class_="shapes.tiny:Tiny", args=ARGS, layout=layout)
    assert recipe.model.args == ARGS
    assert Model(class_="a:B", args={"sizes": (1, 2)}).args == {"sizes": [1, 2]}


def test_custom_class_round_trips(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, OWN))
    text = to_toml(recipe)
    assert tomllib.loads(text)["model"]["class"] == "shapes.tiny:Tiny"
    assert tomllib.loads(text)["model"]["args"] == ARGS
    assert "layers" not in text
    assert load_recipe(write(tmp_path, text, "again.toml")) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert json.loads(recipe.model_dump_json())["model"]["class"] == "shapes.tiny:Tiny"
    assert with_settings(recipe, ["train.steps=700"]).model == recipe.model


def test_decoder_is_written_without_custom_class_keys() -> None:
    written = tomllib.loads(to_toml(Recipe(data=Data(path="d"))))["model"]
    assert written["layers"] == 4
    assert not {"class", "args", "layout"} & set(written)


plain = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.text(min_size=1)
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=8)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)


@settings(max_examples=examples(40))
@given(args=st.dictionaries(names, values))
def test_nested_arguments_round_trip(tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any]) -> None:
    recipe = Recipe(model=Model(class_="a.b:C", args=args), data=Data(path="d"))
    file = tmp_path_factory.mktemp("r") / "r.toml"
    file.write_text(to_toml(recipe), encoding="utf-8", newline="")
    assert load_recipe(file).model.args == args
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert tomllib.loads(to_toml(recipe))["model"]["args"] == args


def test_variant_changes_single_arguments(tmp_path: Path) -> None:
    write(tmp_path, OWN, "base.toml")
    file = write(tmp_path, 'extends = "base.toml"\n[model.args]\nwidth = 32\n[model.args.options]\nmore = 1\n')
    recipe = load_recipe(file, ["model.args.rate=0.25", "model.args.sizes="])
    assert recipe.model.args == {"width": 32, "rate": 0.25, "options": {**ARGS["options"], "more": 1}}
    assert load_recipe(file, ["model.args={}"]).model.args == {}
    assert load_recipe(file, ["model.args="]).model.args == {}


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("model.layers=3", "model.layers does not apply to a custom class: put it into model.args", ""),
        ("model.vocab_size=3", "model.vocab_size does not apply to a custom class", ""),
        ("model.class=shapes", "model.class = 'shapes'", "model.class takes a string matching"),
        ("model.clas=a:B", 'model has no key "clas"', "model.class"),
        ("model.layout.colums=[]", 'model.layout has no key "colums"', "model.layout.columns"),
        ("model.layout.columns=['a b']", "model.layout.columns.0 = 'a b'", "a string matching"),
        ("model.layout.columns=q", "model.layout.columns = 'q'", "a list"),
        ("model.args=3", "model.args = 3", "a table"),
        ("model.args.width=nan", "model.args.width is nan", ""),
        ("model.args.width=[2020-01-01]", "model.args.width.0 is datetime.date(2020, 1, 1)", ""),
        ("model.args.a-b=1", "model.args.a-b is not an identifier", ""),
    ],
)
def test_errors_of_custom_class_settings_are_named(tmp_path: Path, setting: str, message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, OWN), [setting])
    assert message in caught.value.message
    assert "--set" in caught.value.message
    assert hint in (caught.value.hint or "")


def test_custom_class_keys_are_refused_for_a_decoder(tmp_path: Path) -> None:
    for setting in ("model.args={a=1}", "model.layout.blocks=b"):
        with pytest.raises(RecipeError, match=r"model\.(args|layout) does not apply to a decoder"):
            load_recipe(write(tmp_path, MINIMAL), [setting])
    assert load_recipe(write(tmp_path, OWN), ["model.layout="]).model.layout is None
    assert load_recipe(write(tmp_path, OWN), ["model.layers="]).model.class_ == "shapes.tiny:Tiny"


def test_keys_of_other_families_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[data]\npath = "d"\n')
    with pytest.raises(RecipeError, match='model has no key "experts"') as caught:
        load_recipe(file, ["model.experts=8"])
    assert caught.value.hint == "these families have it: mixtral, qwen3_moe, deepseek_v3, gpt_oss (model.family)"
    with pytest.raises(RecipeError, match=r"unknown model\.family") as caught:
        load_recipe(file, ["model.family=qwen3"])
    assert caught.value.hint == "model.init takes a Hugging Face folder of a qwen3"
    with pytest.raises(RecipeError, match=r"unknown model\.family 'mixtrall'") as caught:
        load_recipe(file, ["model.family=mixtrall"])
    assert (caught.value.hint or "").startswith("did you mean mixtral or mistral?")


def test_unknown_kind_of_objective_is_reported_before_its_keys(tmp_path: Path) -> None:
    file = write(tmp_path, '[data]\npath = "d"\n[objective]\nkind = "flow"\ndrop_condition = 0.2\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["objective.kind=flaw"])
    assert caught.value.message == "--set objective.kind=flaw: unknown objective.kind 'flaw'"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean flow")


VIDEO = """
[model]
family = "wan"
[objective]
kind = "flow"
[data]
kind = "video"
path = "d"
"""


@pytest.mark.parametrize("value", ["[4,4]", "[4,4,4,4]", "4"])
def test_list_of_a_fixed_length_says_how_many_it_takes(tmp_path: Path, value: str) -> None:
    file = write(tmp_path, VIDEO)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, [f"model.patch={value}"])
    shown = value.replace(",", ", ")
    assert caught.value.message == f"--set model.patch = {shown}: this is no list of 3 numbers"
    assert caught.value.hint == "model.patch takes a list of 3 numbers, for example model.patch=[1,2,2]"
    file.write_text(VIDEO.replace('"wan"', f'"wan"\npatch = {value}'))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert caught.value.message == f"{file}: model.patch = {shown}: this is no list of 3 numbers"


def test_pair_inside_a_list_says_that_it_takes_two(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, MINIMAL), ["data.skip=[[1,2],[3]]"])
    assert caught.value.message.endswith("data.skip.1 = [3]: this is no list of 2 numbers")
    assert caught.value.hint == "data.skip.1 takes a list of 2 numbers"


@pytest.mark.parametrize("value", ["16", "[16]", "8by8"])
def test_size_that_is_no_width_and_height_says_what_it_takes(tmp_path: Path, value: str) -> None:
    with pytest.raises(RecipeError, match=r"data.media.sizes: '\w+' is not WIDTHxHEIGHT, for example 832x480"):
        load_recipe(write(tmp_path, VIDEO), [f"data.media.sizes={value}"])
