"""What a Hugging Face folder holds beside weights and tokenizer, kept with a run that began there: so that what is
exported has the special tokens, the chat template and the longest sequence that its users know."""

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["apply_sidecars", "copy_sidecars", "save_sidecars"]

CONFIG = "config.json"
OF_THE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_BYTES = 16 << 20


def save_sidecars(folder: Path, into: Path, tokenizer: Path | None) -> None:
    """Copy them from a folder; what speaks of tokens only where the run has the folder's own `tokenizer`."""
    copy_sidecars(folder, folder / "tokenizer.json", into, tokenizer)


def copy_sidecars(kept: Path, its_tokenizer: Path, into: Path, tokenizer: Path | None) -> None:
    """The same from where another run keeps them."""
    same = tokenizer is not None and its_tokenizer.exists() and its_tokenizer.read_bytes() == tokenizer.read_bytes()
    into.mkdir()
    for name in (CONFIG, *(OF_THE_TOKENIZER if same else ())):
        path = kept / name
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            shutil.copyfile(path, into / name)


def apply_sidecars(kept: Path, into: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Copy them into a folder that is being written; returns its config with what only the first folder knew."""
    if not (kept / CONFIG).exists():
        return config
    before = json.loads((kept / CONFIG).read_bytes())
    laid = [name for name in OF_THE_TOKENIZER if (kept / name).exists()]
    for name in laid:
        shutil.copyfile(kept / name, into / name)
    known = {key: before[key] for key in TOKENS if laid and before.get(key) is not None}
    longest = before.get("max_position_embeddings")
    if isinstance(longest, int) and "max_position_embeddings" in config:
        known["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    return config | known
