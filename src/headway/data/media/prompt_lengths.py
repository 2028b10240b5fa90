"""Names captions and prompts that are longer than a text encoder takes before a run starts."""

import textwrap
from pathlib import Path

import numpy as np

from headway.data.media.corpus import MediaCorpus
from headway.data.media.text_tokens import positions_of, token_counter
from headway.errors import DataError, RecipeError, plural
from headway.recipe import Recipe
from headway.recipe.families.diffusion import BYTES, DiffusionModel
from headway.recipe.huggingface import read_config

SHOWN = 60
"""Characters of a prompt in an error."""


def check_captions(corpus: MediaCorpus, model: DiffusionModel) -> None:
    """Raise DataError if samples may get captions that are longer than the model's text encoder takes."""
    media = corpus.recipe.data.media
    assert media is not None, "the corpus is of media"
    if model.conditioning != "text" or media.captions == "none":
        return
    assert model.text_tokens is not None
    count, order = token_counter(model), corpus.order
    used = np.zeros(len(order.index), dtype=np.bool_)  # others are too short for a sample
    used[np.concatenate([order.held_out_clips, *(bucket.segments.clip for bucket in order.buckets)])] = True
    most = 1 if media.captions == "first" else None
    first, number, longest = "", 0, model.text_tokens
    for name, captions in corpus.reader.dataset.captions_of(np.flatnonzero(used)):
        for tokens in map(count, captions[:most]):
            if tokens > model.text_tokens:
                first = first or f"{name} with {tokens}"
                number, longest = number + 1, max(longest, tokens)
    if number:
        raise DataError(
            f"{plural(number, 'caption')} {'is' if number == 1 else 'are'} longer than {model.text_tokens} tokens, the "
            f"first is {first}",
            hint=", or ".join(["shorten them and build the dataset again", *_wider(model, longest)]),
        )


def check_sample_prompts(recipe: Recipe, *, resumed: bool = False) -> None:
    """Raise RecipeError for a prompt of [eval.samples] that is longer than the text encoder takes.

    The text encoder of a `resumed` run cannot change.
    """
    model, samples = recipe.model, recipe.eval.samples
    if not isinstance(model, DiffusionModel) or model.conditioning != "text" or samples is None or not samples.prompts:
        return
    assert model.text_tokens is not None
    lengths = list(map(token_counter(model), samples.prompts))
    for place, tokens in enumerate(lengths):
        if tokens > model.text_tokens:
            shown = textwrap.shorten(samples.prompts[place], SHOWN, placeholder="...")
            raise RecipeError(
                f"eval.samples.prompts[{place}], {shown!r}, has {tokens} tokens; the text encoder takes "
                f"{model.text_tokens}",
                hint=", or ".join(["shorten it", *([] if resumed else _wider(model, max(lengths)))]),
            )


def _wider(model: DiffusionModel, tokens: int) -> list[str]:
    """Return the setting with which a text encoder takes so many tokens; nothing if it cannot."""
    longest = None if model.text_encoder == BYTES else positions_of(read_config(Path(str(model.text_encoder))))
    return [f"--set model.text_tokens={tokens}"] if longest is None or tokens <= longest else []
