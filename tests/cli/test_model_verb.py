"""`headway model show | diff`: numbers counted by hand, faults put in by hand, and exit statuses."""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headway.cli.main import main
from headway.recipe import Model
from headway.recipe.families.wan import Wan
from headway.state.hf_import import import_run
from headway.state.huggingface import LazyWeight, stored_weights, write_folder

SIZES: dict[str, Any] = {"vocab_size": 128, "layers": 3, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48}
# By hand, of those sizes: heads of 8, queries 32 wide, keys and values 16 each.
EMBEDDING = 128 * 32
ATTENTION = 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32)
MLP = 3 * 3 * 32 * 48
NORMS = (2 * 3 + 1) * 32
RECIPE = """
[model]
vocab_size = 128
layers = 3
dim = 32
heads = 4
kv_heads = 2
hidden = 48

[data]
path = "nowhere"
seq = 64
"""


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Ask = Callable[..., Said]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Types a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_RUNS", str(tmp_path / "runs"))

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["headway", "model", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return Said(said.out, said.err, int(end.value.code or 0))

    return run


def weights_of(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in model.tensors().items()}


def folder_of(path: Path, model: Model, arrays: dict[str, np.ndarray] | None = None) -> Path:
    def block(array: np.ndarray) -> list[memoryview]:
        return [array.reshape(-1).view(np.uint8).data]

    found = arrays or weights_of(model)
    write_folder(path, model, {name: LazyWeight("float32", a.shape, partial(block, a)) for name, a in found.items()})
    return path


# -- show


def test_parameters_match_a_count_by_hand(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    found = ask("show", "small.toml", "--json").json
    assert found["parts"] == {"embedding": EMBEDDING, "attention": ATTENTION, "feed-forward": MLP, "norms": NORMS}
    count = EMBEDDING + ATTENTION + MLP + NORMS
    assert found["parameters"] == found["active"] == count
    assert found["weights"] == {"float32": 4 * count, "bfloat16": 2 * count, "8 bit": count}
    training = {"weights": 4 * count, "gradients": 4 * count, "states": 8 * count, "total": 16 * count}
    assert found["training"] == {"optimizer": "adamw", **training}
    products = EMBEDDING + ATTENTION + MLP
    assert found["flops_per_token"] == 6 * products + 6 * 3 * 32 * 64  # layers x width of heads x seq
    assert found["cache"]["token"] == 3 * 2 * 16 * 2
    assert found["cache"]["full"] == found["cache"]["windowed"] == 64 * 3 * 2 * 16 * 2
    assert (found["family"], found["model_type"], found["kind"]) == ("llama", "llama", "recipe")


def test_text_fits_80_columns_and_suggests_a_next_command(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    said = ask("show", "small.toml")
    assert said.status == 0
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "next: headway plan small.toml"
    assert "heads      4 of 8, 2 KV heads" in lines
    assert "positions  rotary, theta 10,000" in lines
    assert any(line.split() == ["embedding", "4,096", "15.0%"] for line in lines), said.out


def test_a_folder_of_diffusers_shows_patches_condition_and_cost_per_sample(ask: Ask, tmp_path: Path) -> None:
    video = Wan(
        dim=24, heads=2, layers=2, hidden=40, text_dim=10, image_channels=20, image_dim=8, text_encoder="somewhere"
    )
    folder_of(tmp_path / "wan", video)
    document = ask("show", "wan", "--seq", "100", "--json").json
    assert document["parameters"] == sum(math.prod(shape) for shape in video.tensors().values())
    assert sum(document["parts"].values()) == document["parameters"]
    assert (document["family"], document["model_type"]) == ("wan", "WanTransformer3DModel")
    assert (document["cache"], document["stored"]["tensors"]) == (None, len(video.tensors()))
    # of a sample: matrices by what they are multiplied with, and scores with keys and values of patches, text and image
    per_patch = 2 * (6 * 24 * 24 + 2 * 24 * 40) + 24 * (36 * 4 + 16 * 4)
    text = 10 * 24 + 24 * 24 + 2 * 2 * 24 * 24
    image = 8 * 8 + 8 * 24 + 2 * 2 * 24 * 24
    once = 256 * 24 + 24 * 24 + 6 * 24 * 24
    products = 100 * per_patch + 512 * text + 257 * image + once
    assert document["flops_per_sample"] == 6 * (products + 2 * 2 * 24 * 100 * (100 + 512 + 257))
    lines = ask("show", "wan").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "patches    1 x 2 x 2 (frames, rows, columns) of 16 channels and 20 of an image" in lines
    assert lines[-1] == "next: a recipe with model.family = wan and model.init = wan"


def test_training_memory_follows_the_recipe(ask: Ask, tmp_path: Path) -> None:
    """bfloat16 weights with a float32 copy, float32 moments; and of what is frozen, weights alone."""
    (tmp_path / "small.toml").write_text(RECIPE)
    count = EMBEDDING + ATTENTION + MLP + NORMS
    keys = ("train.dtype=bfloat16", "train.weights=bfloat16", "train.master=true")
    settings = [word for key in keys for word in ("--set", key)]
    found = ask("show", "small.toml", *settings, "--json").json["training"]
    assert (found["weights"], found["gradients"], found["states"]) == (2 * count, 4 * count, 12 * count)
    found = ask("show", "small.toml", "--set", 'train.freeze=["embed.**"]', "--json").json["training"]
    trained = count - EMBEDDING
    assert (found["weights"], found["gradients"], found["states"]) == (4 * count, 4 * trained, 8 * trained)


def test_windows_bound_the_cache(ask: Ask, tmp_path: Path) -> None:
    """Three layers that keep 10 of 50 tokens, each 2 x 2 heads x 8 numbers of two bytes."""
    folder_of(tmp_path / "mistral", Model(family="mistral", window=10, **SIZES))
    found = ask("show", "mistral", "--seq", "50", "--json").json
    assert found["windows"] == {"10": 3}
    assert found["cache"]["full"] == 50 * 3 * 32 * 2
    assert found["cache"]["windowed"] == 10 * 3 * 32 * 2
    assert "10 tokens in 3 of 3 layers" in ask("show", "mistral").out


def test_active_parameters_of_a_mixture(ask: Ask, tmp_path: Path) -> None:
    """Of 8 experts a token sees 2: six of three matrices each are left out in both layers."""
    recipe = RECIPE.replace("[model]", '[model]\nfamily = "mixtral"\nexperts = 8\ntop_k = 2').replace(
        "layers = 3", "layers = 2"
    )
    (tmp_path / "mixture.toml").write_text(recipe)
    found = ask("show", "mixture.toml", "--json").json
    assert found["parts"]["experts"] == 2 * 8 * 3 * 32 * 48
    assert found["parts"]["router"] == 2 * 8 * 32
    assert found["parameters"] - found["active"] == 2 * 6 * 3 * 32 * 48
    assert "experts    2 of 8" in ask("show", "mixture.toml").out


def test_vocabulary_comes_from_the_dataset_or_is_assumed(ask: Ask, tmp_path: Path) -> None:
    """With data the tokenizer's size, rounded up as training does; without it a guess, which is said."""
    (tmp_path / "open.toml").write_text(RECIPE.replace("vocab_size = 128\n", ""))
    said = ask("show", "open.toml", "--json").json
    assert said["fields"]["vocab_size"] == 4096
    assert said["notes"] == ["nowhere is not built: assuming a vocabulary of 4,096 tokens"]
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "manifest.json").write_text('{"vocab_size": 129}')
    said = ask("show", "open.toml", "--json").json
    assert (said["fields"]["vocab_size"], said["notes"]) == (192, [])


LONG = "and a line that is far too long for any terminal there is"
TEMPLATE = f"\n  {{% set x = ''.__class__ %}}\x1b[31m{{{{ x.mro() }}}} {LONG}\n{{{{ y }}}}"
NAMED = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("chat_template.jinja", TEMPLATE),
        ("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE})),
        ("tokenizer_config.json", json.dumps({"chat_template": NAMED})),
    ],
)
def test_a_chat_template_is_read_and_never_run(ask: Ask, tmp_path: Path, file: str, text: str) -> None:
    folder = folder_of(tmp_path / "chat", Model(**SIZES))
    (folder / file).write_text(text)
    found = ask("show", "chat", "--json").json["chat_template"]
    assert (found["file"], found["letters"]) == (file, len(TEMPLATE))
    assert found["begins"].startswith("{% set x = ''.__class__ %}")
    said = ask("show", "chat")
    assert "\x1b" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.out.splitlines()[-1] == "next: headway checkpoint import chat"


def test_a_folder_without_template_and_one_with_a_config_alone(ask: Ask, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "plain", Model(**SIZES))
    (folder / "tokenizer_config.json").write_text("not json")
    found = ask("show", "plain", "--json").json
    assert found["chat_template"] is None
    count = EMBEDDING + ATTENTION + MLP + NORMS
    assert found["stored"] == {"tensors": 29, "bytes": 4 * count, "dtypes": {"float32": 4 * count}}
    (folder / "model.safetensors").unlink()
    assert ask("show", "plain/config.json", "--json").json["stored"] is None


def test_weights_that_do_not_match_the_config_are_noted(ask: Ask, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "cut", Model(**SIZES))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert ask("show", "cut", "--json").json["notes"] == ["cut lacks model.norm.weight"]


def test_positions_and_scaling(ask: Ask, tmp_path: Path) -> None:
    gpt2 = Model(family="gpt2", **{**SIZES, "kv_heads": 4}, positions=20)
    folder_of(tmp_path / "gpt2", gpt2)
    said = ask("show", "gpt2")
    assert "positions  learned, 20 of them" in said.out
    assert "per training token at 20 (" in said.out
    assert ask("show", "gpt2", "--json").json["parts"]["embedding"] == (128 + 20) * 32
    refused = ask("show", "gpt2", "--seq", "21")
    assert refused.status == 2
    assert "has 20 positions" in refused.err
    scaling = {"kind": "yarn", "factor": 4.0, "original": 1024}
    folder_of(tmp_path / "yarn", Model(**SIZES, rope_scaling=scaling))
    assert "positions  rotary, theta 10,000, yarn x 4 from 1,024 tokens" in ask("show", "yarn").out


def test_runs_and_steps(ask: Ask, tmp_path: Path) -> None:
    model = Model(**SIZES)
    folder = folder_of(tmp_path / "plain", model)
    import_run(tmp_path / "runs", "taken", model, stored_weights(folder, model), source="plain", seq=64)
    (saved,) = (tmp_path / "runs/taken/checkpoints").iterdir()
    for name in ("taken", "taken@0", str(saved)):
        found = ask("show", name, "--json").json
        assert found["parameters"] == EMBEDDING + ATTENTION + MLP + NORMS, name
        assert found["stored"]["tensors"] == 29
    assert ask("diff", "plain", "taken", "--weights").status == 0
    assert ask("show", "taken@7").status == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "none.toml"], "none.toml"),
        (["show", "no/where"], "no/where not found"),
        (["show", "somebody"], "no runs"),
        (["show", "own.toml"], "a custom class"),
        (["show", "odd"], "unknown model_type 'rwkv'"),
        (["show", "somebody", "--set", "model.dim=8"], "is not one"),
    ],
)
def test_what_cannot_be_shown(ask: Ask, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "own.toml").write_text('[model]\nclass = "mine:Mine"\n[data]\npath = "nowhere"\n')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "rwkv"}')
    found = ask(*words)
    assert found.status in (1, 2)
    assert said in found.err
    assert "hint:" in found.err


# -- diff


def test_a_folder_is_the_same_as_itself_and_its_recipe(ask: Ask, tmp_path: Path) -> None:
    folder_of(tmp_path / "a", Model(**SIZES))
    (tmp_path / "small.toml").write_text(RECIPE)
    said = ask("diff", "a", "a", "--weights")
    assert said.status == 0
    assert "the same fields, tensors and values" in said.out
    said = ask("diff", "a", "small.toml")
    assert said.status == 0, said.out
    assert said.out.splitlines()[-1] == "next: headway model show a", "a recipe has no weights to compare"
    assert ask("diff", "a", "a").out.splitlines()[-1] == "next: headway model diff a a --weights"


def test_one_differing_value_among_thousands_is_found(ask: Ask, tmp_path: Path) -> None:
    model = Model(**SIZES)
    arrays = weights_of(model)
    folder_of(tmp_path / "a", model, arrays)
    arrays["layers.1.mlp.up.weight"] = arrays["layers.1.mlp.up.weight"].copy()
    before = float(arrays["layers.1.mlp.up.weight"][7, 5])
    arrays["layers.1.mlp.up.weight"][7, 5] = before + 0.5
    folder_of(tmp_path / "b", model, arrays)
    assert ask("diff", "a", "b").status == 0, "values were not asked for"
    said = ask("diff", "a", "b", "--weights", "--json")
    assert said.status == 1
    values = said.json["values"]
    assert values["feed-forward"]["worst"] == "layers.1.mlp.up.weight"
    assert values["feed-forward"]["differing"] == 1
    assert values["feed-forward"]["elements"] == MLP
    assert values["feed-forward"]["absolute"] == pytest.approx(0.5, rel=1e-6)
    assert [part for part, one in values.items() if one["differing"]] == ["feed-forward"]
    people = ask("diff", "a", "b", "--weights")
    assert "they differ in 1 value" in people.out
    assert max(map(len, people.out.splitlines())) <= 80


def test_fields_and_shapes(ask: Ask, tmp_path: Path) -> None:
    folder_of(tmp_path / "a", Model(**SIZES))
    folder_of(tmp_path / "b", Model(**{**SIZES, "layers": 2, "hidden": 64}, qkv_bias=True))
    said = ask("diff", "a", "b", "--json")
    assert said.status == 1
    found = said.json
    assert found["fields"] == {"layers": [3, 2], "hidden": [48, 64], "qkv_bias": [False, True]}
    assert len(found["tensors"]["only_first"]) == 9  # all of the third layer
    assert len(found["tensors"]["only_second"]) == 6  # biases of queries, keys and values in two layers
    assert found["tensors"]["shapes"]["layers.0.mlp.up.weight"] == [[48, 32], [64, 32]]
    people = ask("diff", "a", "b")
    assert max(map(len, people.out.splitlines())) <= 80
    assert "layers" in people.out


def test_tensors_of_another_dtype_are_listed(ask: Ask, tmp_path: Path) -> None:
    """Half precision of the same weights: all tensors are said to be of another dtype, and how far rounding went."""
    model = Model(**SIZES)
    arrays = weights_of(model)
    folder_of(tmp_path / "a", model, arrays)
    file = folder_of(tmp_path / "b", model, arrays) / "model.safetensors"
    save_file({name: tensor.astype(np.float16) for name, tensor in load_file(file).items()}, file)
    found = ask("diff", "a", "b", "--weights", "--json").json
    assert {tuple(pair) for pair in found["tensors"]["dtypes"].values()} == {("float32", "float16")}
    embed = arrays["embed.weight"]
    rounding = np.abs(embed.astype(np.float64) - embed.astype(np.float16).astype(np.float64)).max()
    assert found["values"]["embedding"]["absolute"] == rounding
    assert "29 tensors: float32 | float16" in ask("diff", "a", "b").out


@pytest.mark.parametrize("words", [["a", "none"], ["a", "small.toml", "--weights"], ["a"]])
def test_exit_status_2_for_models_that_cannot_be_read(ask: Ask, tmp_path: Path, words: list[str]) -> None:
    folder_of(tmp_path / "a", Model(**SIZES))
    (tmp_path / "small.toml").write_text(RECIPE)
    assert ask("diff", *words).status == 2
