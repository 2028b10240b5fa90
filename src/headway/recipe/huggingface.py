"""A model section from a Hugging Face config.json, and back.

What a family cannot do exactly is refused: a model that loads is the same model.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.recipe.families import MODEL_TYPES
from headway.recipe.model import Config, Model

__all__ = ["config_from_model", "model_from_config", "read_config", "read_model"]

HOUSEKEEPING = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "model_type", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "attention_dropout", "max_position_embeddings", "_name_or_path",
}  # fmt: skip
"""Keys that say nothing of what a model computes."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}",
            hint="a Hugging Face folder holds config.json and *.safetensors",
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__}, not an object")
    return config


def read_model(folder: Path) -> Model:
    """The model section of a Hugging Face folder."""
    return model_from_config(read_config(folder))


def model_from_config(config: Config) -> Model:
    """The same decoder as a recipe's model section; ModelError names what it cannot do."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise _unknown(config)
    return MODEL_TYPES[kind].from_config(config)


def config_from_model(model: Model, seq: int = 2048) -> dict[str, Any]:
    """A config.json that `transformers` reads as the same decoder; `seq` is the length it was trained at."""
    return model.to_config(seq)


# -- families that are not known


class _Asked(dict[str, Any]):
    """A config that remembers which keys were looked at."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.keys_asked = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)


def _unknown(config: Config) -> ModelError:
    """Which families there are, which of them is nearest, and what differs from that."""
    known, namesake = f"known: {', '.join(MODEL_TYPES)}", _namesake(config)
    said = {key for key, value in config.items() if value not in (None, False, [], {})} - HOUSEKEEPING
    nearest, differs = min(_differences(config, said), key=lambda found: len(found[1]), default=("", []))
    if namesake is not None:
        known += f"; the nearest is {namesake}"
    elif nearest and len(differs) < len(said):
        more = f" and {len(differs) - 6} more" if len(differs) > 6 else ""
        known += f"; the nearest is {nearest}, which has no {', '.join(differs[:6])}{more}" if differs else ""
        known += f"; the nearest is {nearest}, and its keys do not say what differs" if not differs else ""
    kind = config.get("model_type")
    return ModelError(f"config.json has model_type {kind!r}, a family that is not known", hint=known)


def _namesake(config: Config) -> str | None:
    """What the family of nearly the same name says to a config."""
    close = difflib.get_close_matches(str(config.get("model_type")), MODEL_TYPES, n=1, cutoff=0.8)
    if not close:
        return None
    try:
        MODEL_TYPES[close[0]].from_config({**config, "model_type": close[0]})
    except ModelError as error:
        return f"{close[0]}: {error.message}"
    return None


def _differences(config: Config, said: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Of every family, the keys of a config that it never looks at, or why it refuses it."""
    for kind, family in MODEL_TYPES.items():
        asked = _Asked({**config, "model_type": kind})
        try:
            family.from_config(asked)
        except (ModelError, ValueError, TypeError, KeyError):
            continue
        yield kind, sorted(said - asked.keys_asked)
