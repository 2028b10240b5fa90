"""Answers of the OpenAI API, from outputs of the engine."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.inference.outputs import TokenLogprobs
from headway.inference.text_engine import TextEngine, TextOutput


@dataclass
class Choice:
    """One output of a request, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    def add(self, part: TextOutput) -> None:
        """Append an output."""
        self.text += part.text
        if part.output.token_id is not None:
            self.token_ids.append(part.output.token_id)
        if part.output.logprobs is not None:
            self.logprobs.append(part.output.logprobs)
        self.finish = part.output.finish or self.finish


def head(request_id: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that all answers begin with."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return an error; `param` is the field that is wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return the number of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


def completion_logprobs(
    engine: TextEngine, ids: Sequence[int], rows: Sequence[TokenLogprobs | None], offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions; `offset` is where the first token's text begins."""
    tokens = [token_text(engine, token) for token in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else row.logprob for row in rows],
        "top_logprobs": [None if row is None else _by_text(engine, row.top) for row in rows],
        "text_offset": offsets,
    }


def token_text(engine: TextEngine, token: int) -> str:
    """Return the text of one token; its id, where the model has no tokenizer."""
    return f"token_id:{token}" if engine.loaded.tokenizer is None else engine.decode([token])


def _by_text(engine: TextEngine, top: Mapping[int, float]) -> dict[str, float]:
    """Return log-probabilities by text; of tokens with the same text, the likeliest."""
    by_text: dict[str, float] = {}
    for token, logprob in top.items():
        by_text.setdefault(token_text(engine, token), logprob)
    return by_text


def chat_logprobs(engine: TextEngine, ids: Iterable[int], rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return log-probabilities in the form of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(engine, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(token, row.logprob) | {"top_logprobs": [entry(*pair) for pair in row.top.items()]}
            for token, row in zip(ids, rows, strict=True)
        ]
    }
