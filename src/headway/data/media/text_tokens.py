"""The tokenizers of text encoders, without torch: a folder's, or the bytes that the small one of Headway's takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.recipe.families.diffusion import BYTES, DiffusionModel

CLIP_TYPES = ("clip_text_model", "clip")
CLIP_POSITIONS = 77
"""Of a CLIP folder that does not state them."""


def token_counter(model: DiffusionModel) -> Callable[[str], int]:
    """Return what counts the tokens of a prompt, the one that ends it included."""
    if model.text_encoder == BYTES:
        return lambda prompt: len(prompt.encode()) + 1
    tokenizer = folder_tokenizer(Path(str(model.text_encoder)))
    # one at a time: `encode_batch` starts threads, after which the launcher cannot fork without a warning
    return lambda prompt: len(tokenizer.encode(prompt).ids)


def folder_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a text encoder's folder, or of the folder `tokenizer` beside it, as in pipelines."""
    from tokenizers import Tokenizer

    for file in (folder / "tokenizer.json", folder.parent / "tokenizer" / "tokenizer.json"):
        if file.is_file():
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
    raise ModelError(
        f"{folder} has no tokenizer.json, nor has {folder.parent / 'tokenizer'}",
        hint="transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)",
    )


def positions_of(config: dict[str, Any]) -> int | None:
    """Return how many tokens a text encoder has positions for, from its config.json; None if any number."""
    if config.get("model_type") not in CLIP_TYPES:
        return None
    return int((config.get("text_config") or config).get("max_position_embeddings", CLIP_POSITIONS))
