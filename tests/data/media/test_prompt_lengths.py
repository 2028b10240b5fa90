"""Captions and prompts that are too long for the text encoder are named before a run starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway.agent.launch.prepare import new_run, resume_run
from headway.data.media import MediaOptions, build_media
from headway.errors import DataError, ModelError, RecipeError
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe

LONG = "a red square that moves to the left"
"""35 bytes; 8 words."""


@pytest.fixture
def captioned(tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe of images with such captions each."""

    def make(captions: list[list[str]], **changes: dict[str, Any]) -> Recipe:
        folder = tmp_path / "images"
        folder.mkdir()
        rows = []
        for number, texts in enumerate(captions):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number:03d}.png")
            rows.append({"file": f"{number:03d}.png", "captions": texts})
        (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = MediaOptions(kind="image", captions=(str(tmp_path / "captions.jsonl"),))
        build_media(tmp_path / "built", [str(folder)], options)
        model = {"family": "dit", "in_channels": 3, "patch": 4, "layers": 1, "dim": 16, "heads": 2}
        values: dict[str, Any] = {
            "model": {**model, "conditioning": "text", "text_tokens": 32, **changes.get("model", {})},
            "data": {
                "kind": "image", "path": str(tmp_path / "built"), "holdout": 0.0,
                "media": {"sizes": "8x8", **changes.get("media", {})},
            },
            "objective": {"kind": "flow"},
            "train": {"batch": 2},
            "eval": changes.get("eval", {}),
        }  # fmt: skip
        return parse_recipe(values, {}, "test")

    return make


def refused(recipe: Recipe, folder: Path) -> DataError | RecipeError | ModelError:
    with pytest.raises((DataError, RecipeError, ModelError)) as caught:
        new_run(recipe, folder / "runs", workers=1)
    assert not (folder / "runs").exists()
    return caught.value


def text_encoder(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a config.json and a tokenizer of words that ends every text with </s>, and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_captions_that_are_too_long_are_named_before_a_launch(captioned: Callable[..., Recipe], tmp_path: Path) -> None:
    error = refused(captioned([["a cat"], ["é" * 16], ["short", LONG], [LONG + "!"]]), tmp_path)
    assert error.message == "3 captions are longer than 32 tokens, the first is 001.png with 33"
    assert error.hint == "shorten them and build the dataset again, or --set model.text_tokens=37"


@pytest.mark.parametrize("media", [{"captions": "first"}, {"captions": "none"}, {}])
def test_only_captions_that_samples_may_get_count(
    captioned: Callable[..., Recipe], tmp_path: Path, media: dict[str, Any]
) -> None:
    recipe = captioned([["a cat"], ["x" * 31, LONG]], media=media)
    if media:
        assert new_run(recipe, tmp_path / "runs", workers=1).run.name
    else:
        assert refused(recipe, tmp_path).message == "1 caption is longer than 32 tokens, the first is 001.png with 36"


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"model_type": "clip_text_model", "max_position_embeddings": 8}, ""),
        ({"model_type": "t5"}, ", or --set model.text_tokens=9"),
    ],
)
def test_captions_are_counted_with_the_tokenizer_of_a_folder(
    captioned: Callable[..., Recipe], tmp_path: Path, config: dict[str, Any], hint: str
) -> None:
    folder = text_encoder(tmp_path / "encoder", config)
    error = refused(captioned([["a cat"], [LONG]], model={"text_encoder": folder, "text_tokens": 8}), tmp_path)
    assert error.message == "1 caption is longer than 8 tokens, the first is 001.png with 9"
    assert error.hint == f"shorten them and build the dataset again{hint}"


def test_text_encoder_without_a_tokenizer_is_named_before_a_launch(
    captioned: Callable[..., Recipe], tmp_path: Path
) -> None:
    error = refused(captioned([["a cat"], ["a dog"]], model={"text_encoder": str(tmp_path / "none")}), tmp_path)
    assert error.message.startswith(f"{tmp_path}/none has no tokenizer.json")


def test_sample_prompt_that_is_too_long_is_named_before_a_launch(
    captioned: Callable[..., Recipe], tmp_path: Path
) -> None:
    prompts = {"every_steps": 500, "samples": {"prompts": ["a cat", LONG]}}
    error = refused(captioned([["a cat"], ["a dog"]], eval=prompts), tmp_path)
    assert error.message == f"eval.samples.prompts[1], {LONG!r}, has 36 tokens; the text encoder takes 32"
    assert error.hint == "shorten it, or --set model.text_tokens=36"


def test_sample_prompt_of_a_resumed_run_is_checked(captioned: Callable[..., Recipe], tmp_path: Path) -> None:
    run = new_run(captioned([["a cat"], ["a dog"]]), tmp_path / "runs", workers=1).folder
    with pytest.raises(RecipeError, match=r"eval.samples.prompts\[0\], 'a red .*', has 36 tokens") as caught:
        resume_run(run, [f'eval.samples.prompts=["{LONG}"]'])
    assert caught.value.hint == "shorten it"
