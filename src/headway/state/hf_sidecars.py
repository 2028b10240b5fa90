"""Sidecar files of a Hugging Face folder, stored with a run that started from it: an export has the special tokens,
the chat template and the longest sequence of the original."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.recipe import Model

CONFIG = "config.json"
TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
CHAT_FILES = ("chat_template.jinja", "tokenizer_config.json")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_BYTES = 16 << 20


def save_sidecars(folder: Path, into: Path, tokenizer: Path | None) -> None:
    """Copy a folder's sidecars; those about tokens only if the run uses the folder's own `tokenizer`."""
    copy_sidecars(folder, folder / "tokenizer.json", into, tokenizer)


def copy_sidecars(sidecars: Path, own_tokenizer: Path, into: Path, tokenizer: Path | None) -> None:
    """Copy sidecars that another run stored, with the tokenizer that they belong to."""
    same = tokenizer is not None and own_tokenizer.exists() and own_tokenizer.read_bytes() == tokenizer.read_bytes()
    into.mkdir()
    for name in (CONFIG, *(TOKEN_FILES if same else ())):
        path = sidecars / name
        if path.is_file() and path.stat().st_size <= MAX_BYTES:
            shutil.copyfile(path, into / name)


def save_chat_template(data: Path, into: Path, end_of_turn: int) -> None:
    """Copy the chat template of a dataset, which replaces the original's, and note the token that ends a turn."""
    into.mkdir(exist_ok=True)
    for name in CHAT_FILES:
        shutil.copyfile(data / name, into / name)
    for name in (CONFIG, "generation_config.json"):
        path = into / name
        if path.is_file():
            config = json.loads(path.read_bytes())
            ends = config.get("eos_token_id")
            known = ends if isinstance(ends, list) else [] if ends is None else [ends]
            if end_of_turn not in known:
                config["eos_token_id"] = [end_of_turn, *known]
                path.write_text(json.dumps(config, indent=2) + "\n")


def apply_sidecars(sidecars: Path, into: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Copy sidecars into an export; return its config with what only the original folder knew."""
    original = original_config(sidecars)
    copied = [name for name in TOKEN_FILES if (sidecars / name).exists()]
    for name in copied:
        shutil.copyfile(sidecars / name, into / name)
    known = {key: original[key] for key in TOKEN_KEYS if copied and original.get(key) is not None}
    if "max_position_embeddings" in config:
        known["max_position_embeddings"] = _longer(config, original)
    return config | known


def longest_sequence(model: Model, seq: int, original: Mapping[str, Any]) -> int:
    """Return how many tokens a sequence of a trained model may have: as many as its export's config.json says.

    `seq` is the length that it was trained at, `original` the config.json of the weights that it started from, if any.
    """
    if model.class_ is not None:
        return seq
    config = model.to_config(seq)
    return model.longest or (_longer(config, original) if "max_position_embeddings" in config else seq)


def original_config(sidecars: Path) -> dict[str, Any]:
    """Return the config.json that came with a model's first weights; nothing if there is none."""
    stored = sidecars / CONFIG
    return dict(json.loads(stored.read_bytes())) if stored.exists() else {}


def _longer(config: Mapping[str, Any], original: Mapping[str, Any]) -> int:
    longest = original.get("max_position_embeddings")
    return max(int(config["max_position_embeddings"]), longest if isinstance(longest, int) else 0)
