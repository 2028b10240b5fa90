"""Autoregressive generation of one sequence of token ids, with a KV cache."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headway.models import Decoder, LayerKvCache, empty_cache
from headway.recipe import Model
from headway.recipe.rope import RotaryModel


def generate_ids(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_id: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` ids after a non-empty prompt; end before `stop_id`, and where the model's positions end.

    Ids from `vocab_size` on are never sampled: a model's vocabulary may be padded beyond the tokenizer's. The same seed
    gives the same ids on the same machine.
    """
    assert prompt_ids, "the prompt is not empty"
    device = decoder.output_weight.device
    generator = torch.Generator().manual_seed(seed)
    if decoder.model.longest is not None:
        max_tokens = min(max_tokens, decoder.model.longest - len(prompt_ids))
    cache = empty_cache(decoder, capacity=len(prompt_ids) + max_tokens)
    turn = _new_positions_after(decoder.model)
    ids, seen = list(prompt_ids), list(prompt_ids)
    for _ in range(max_tokens):
        if len(seen) == turn + 1 and cache[0].length:
            cache, ids = empty_cache(decoder, capacity=len(prompt_ids) + max_tokens), list(seen)
        logits_V = _next_logits(decoder, torch.tensor([ids], device=device), cache)
        chosen = sample_token(logits_V[:vocab_size], temperature=temperature, top_k=top_k, generator=generator)
        if chosen == stop_id:
            return
        yield chosen
        ids = [chosen]
        seen.append(chosen)


def _new_positions_after(model: Model) -> int:
    """Return the length at which rotary frequencies switch (longrope), so that cached keys become invalid."""
    scaling = model.rope_scaling if isinstance(model, RotaryModel) else None
    return scaling.original or 0 if scaling is not None and scaling.kind == "longrope" else sys.maxsize


@torch.inference_mode()
def _next_logits(decoder: Decoder, tokens_1L: Tensor, cache: list[LayerKvCache]) -> Tensor:
    """Return the logits of the next token, in float32."""
    x_1LD = decoder.hidden(tokens_1L, cache=cache)
    return decoder.logits(x_1LD[0, -1]).float()


def sample_token(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Sample an id from the `top_k` likeliest (0: all) at a temperature; at 0, take the likeliest."""
    if temperature == 0:
        return int(logits_V.argmax())
    cut = 0 < top_k < len(logits_V)
    scores, ids = logits_V.topk(top_k) if cut else (logits_V, None)
    scores = scores.cpu()
    # The best score is subtracted first, so that a tiny temperature cannot overflow.
    weights = torch.softmax((scores - scores.max()) / temperature, dim=0)
    drawn = int(torch.multinomial(weights, 1, generator=generator))
    return drawn if ids is None else int(ids[drawn])


def text_pieces(ids: Iterable[int], decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> Iterator[str]:
    """Decode a stream of ids, yielding text whenever characters are complete; `before` are the preceding ids.

    A token may hold part of a character or depend on the previous one: a window of recent ids is decoded, and its new
    text yielded.
    """
    window = list(before)[-WINDOW:]
    shown = len(decode(window))
    for token in ids:
        window.append(token)
        text = decode(window)
        if text.endswith(HALF_CHARACTER):
            continue
        if text[shown:]:
            yield text[shown:]
        window = window[-WINDOW:]
        shown = len(decode(window))
    rest = decode(window)[shown:]
    if rest:
        yield rest


WINDOW = 16
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
