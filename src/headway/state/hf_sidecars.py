"""Sidecar files of a Hugging Face folder, stored with a run that started from it: an export has the special tokens,
the chat template and the longest sequence of the original."""

import json
import shutil
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
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


def apply_sidecars(sidecars: Path, into: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Copy sidecars into an export; return its config with what only the original folder knew."""
    if not (sidecars / CONFIG).exists():
        return config
    original = json.loads((sidecars / CONFIG).read_bytes())
    copied = [name for name in TOKEN_FILES if (sidecars / name).exists()]
    for name in copied:
        shutil.copyfile(sidecars / name, into / name)
    known = {key: original[key] for key in TOKEN_KEYS if copied and original.get(key) is not None}
    longest = original.get("max_position_embeddings")
    if isinstance(longest, int) and "max_position_embeddings" in config:
        known["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    return config | known
