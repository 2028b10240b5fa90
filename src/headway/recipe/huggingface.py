"""Convert a Hugging Face config.json to a recipe's model section, and back.

What a family cannot reproduce exactly is refused: a model that loads computes the same function.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.recipe.families import DIFFUSERS, MODEL_TYPES
from headway.recipe.model import Config, Model

CLASSIFIER = "ForSequenceClassification"
"""How the names of classifiers end in `transformers`."""
HOUSEKEEPING = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "model_type", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "attention_dropout", "max_position_embeddings", "_name_or_path",
}  # fmt: skip
"""Keys that do not affect what a model computes."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}",
            hint="a Hugging Face folder has config.json and *.safetensors",
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def read_model(folder: Path) -> Model:
    """Return the model section for a Hugging Face folder."""
    return model_from_config(read_config(folder))


def model_from_config(config: Config) -> Model:
    """Return the model section for a config.json; raise ModelError for unsupported settings."""
    kind = config.get("model_type")
    if kind is None and config.get("_class_name") in DIFFUSERS:
        return DIFFUSERS[config["_class_name"]].from_config(config)
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise _unknown(config)
    model = MODEL_TYPES[kind].from_config(config)
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(CLASSIFIER):
        return model
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise ModelError(
            f"config.json is of a classifier with {labels} labels", hint="a reward model has one: num_labels = 1"
        )
    return model.model_copy(update={"reward": True})


def reward_config(config: Config) -> dict[str, Any]:
    """Return the config.json of a decoder as that of a reward model: a classifier of one label, in `transformers`."""
    name = str(config["architectures"][0])
    if config["model_type"] == "gemma3_text":
        name = "Gemma3TextForCausalLM"
    name = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIER
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, "architectures": [name], **labels}


def stored_dtype(config: Config) -> str | None:
    """Return the precision of a folder's weights, as its config.json says; older ones call it torch_dtype."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ("bfloat16", "float16", "float32") else None


# -- unknown families


class _TrackedConfig(dict[str, Any]):
    """A config that records which keys were read."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.keys_read = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


def _unknown(config: Config) -> ModelError:
    """Return an error with the known families, the closest of them and how it differs."""
    known, namesake = f"known: {', '.join(MODEL_TYPES)}", _namesake(config)
    used = {key for key, value in config.items() if value not in (None, False, [], {})} - HOUSEKEEPING
    nearest, differs = min(_differences(config, used), key=lambda family: len(family[1]), default=("", []))
    if namesake is not None:
        known += f"; the closest is {namesake}"
    elif nearest and len(differs) < len(used):
        more = f" and {len(differs) - 6} more" if len(differs) > 6 else ""
        known += f"; the closest is {nearest}, which has no {', '.join(differs[:6])}{more}" if differs else ""
        known += f"; the closest is {nearest}, which has the same keys" if not differs else ""
    kind = config.get("model_type")
    return ModelError(f"config.json has unknown model_type {kind!r}", hint=known)


def _namesake(config: Config) -> str | None:
    """Return why the family with a similar name refuses a config, if it does."""
    close = difflib.get_close_matches(str(config.get("model_type")), MODEL_TYPES, n=1, cutoff=0.8)
    if not close:
        return None
    try:
        MODEL_TYPES[close[0]].from_config({**config, "model_type": close[0]})
    except ModelError as error:
        return f"{close[0]}: {error.message}"
    return None


def _differences(config: Config, used: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield every family that accepts a config, with the keys it ignores."""
    for kind, family in MODEL_TYPES.items():
        tracked = _TrackedConfig({**config, "model_type": kind})
        try:
            family.from_config(tracked)
        except (ModelError, ValueError, TypeError, KeyError):
            continue
        yield kind, sorted(used - tracked.keys_read)
