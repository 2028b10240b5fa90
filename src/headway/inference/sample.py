"""`python -m headway.inference.sample`: the process behind `headway sample`.

Reads one request, a JSON object, from stdin. Streams JSON lines to stdout: pieces of text
{"prompt_index", "text"}, or on an error a last {"error", "hint"} and the error's exit status.
"""

import signal
import sys
from collections.abc import Iterator
from typing import Any

from headway.errors import RunError
from headway.inference.load import ModelSource
from headway.inference.params import SamplingParams
from headway.inference.request_process import answer_request
from headway.inference.text_engine import TextEngine
from headway.state.parent_process import end_with_parent

DEFAULT_TOKENS = 100


class SampleRequest(ModelSource):
    """A model, prompts and sampling options."""

    prompts: list[str]
    """Prompts; an empty one starts a document."""
    max_tokens: int | None = None
    """By default 100, or what the context has room for."""
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def sample(request: SampleRequest) -> Iterator[dict[str, Any]]:
    """Yield pieces of text, prompt by prompt."""
    engine = TextEngine(request.load())
    if engine.loaded.tokenizer is None:
        raise RunError(
            f"{engine.loaded.name} has no tokenizer",
            hint='headway generate takes token ids: {"prompt": [1, 2]}',
        )
    for index, prompt in enumerate(request.prompts):
        ids = engine.encode(prompt)
        most = request.max_tokens or engine.fitting(ids, DEFAULT_TOKENS)
        params = SamplingParams(
            max_tokens=most, temperature=request.temperature, top_k=request.top_k, seed=request.seed
        )
        engine.add(str(index), ids, params)
    texts, done, shown = [""] * len(request.prompts), set[int](), 0
    while engine.busy:
        for part in engine.step():
            index = int(part.output.request_id)
            texts[index] += part.text
            if part.output.finish is not None:
                done.add(index)
        # All run at once; text comes out prompt by prompt.
        while shown < len(texts):
            if texts[shown]:
                yield {"prompt_index": shown, "text": texts[shown]}
                texts[shown] = ""
            if shown not in done:
                break
            shown += 1


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(answer_request(SampleRequest, sample))
