"""Offline inference in Python: `LLM(path).generate(prompts, params)` and `.chat(messages)`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.errors import RequestError
from headway.frozen_heap import frozen_heap
from headway.inference.chat import render_chat
from headway.inference.engine import RequestsAtSwap, TokenLogprobs
from headway.inference.load import LoadedModel, copy_into, load_model
from headway.inference.params import SamplingParams
from headway.inference.sequence import FinishReason
from headway.inference.text_engine import EngineOptions, TextEngine, encoded

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Completion:
    """One output of a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, where they were asked for."""
    kept: list[float] = field(default_factory=list)
    """Probability mass that truncation kept at each token."""


@dataclass
class Generated:
    """A prompt and its outputs."""

    prompt_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text


class LLM:
    """A model in this process: a Hugging Face folder, a run, RUN@STEP, an address in a store, or a loaded model."""

    def __init__(
        self,
        model: str | Path | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        runs: Path | None = None,
        options: EngineOptions | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        """`adapters` are folders of PEFT's, or checkpoints of runs, by the names that requests use.

        `on_step` is called after every step of the engine.
        """
        loaded = model if isinstance(model, LoadedModel) else load_model(model, device=device, dtype=dtype, runs=runs)
        if adapters:
            loaded.add_adapters({name: Path(path) for name, path in adapters.items()})
        self.engine = TextEngine(loaded, options)
        self._count, self._on_step = 0, on_step

    @property
    def model(self) -> LoadedModel:
        """The model and its tokenizer."""
        return self.engine.loaded

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_done: Callable[[int, Generated], None] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Generated]:
        """Continue prompts; return their outputs in the same order. `on_done` is called as each is complete.

        `adapter` names the adapter of all prompts, or of each.
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        each = [params or self.params()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        results = []
        numbers: dict[str, int] = {}
        for number, (prompt, one_params, name) in enumerate(zip(prompts, each, names, strict=True)):
            ids = self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]
            request_id = f"{self._count}"
            self._count += 1
            self.engine.add(request_id, ids, one_params, name)
            numbers[request_id] = number
            results.append(Generated(ids, [Completion() for _ in range(one_params.n)]))
        try:
            with frozen_heap():
                self._run(numbers, results, on_done)
        finally:
            for request_id in numbers:
                self.engine.abort(request_id)
        return results

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **template_arguments: Any,
    ) -> list[Generated]:
        """Answer one conversation, or several, by the model's chat template; `adapter` as in `generate`."""
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        texts = [
            render_chat(self.model, conversation, tools=tools, template_arguments=template_arguments)
            for conversation in conversations
        ]
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise RequestError(f"{self.model.name} has no tokenizer", hint="generate from token ids")
        return self.generate([encoded(tokenizer, text) for text in texts], params, adapter=adapter)

    def swap_weights(self, weights: Mapping[str, Tensor], version: int, *, requests: RequestsAtSwap = "finish") -> None:
        """Copy new weights, by parameter name, into the model; `version` is noted with the tokens that they sample."""
        waits = self.engine.engine.would_wait(requests)
        self.engine.engine.swap(version, copy_into(self.model.module, weights, keep=waits), requests)

    def update_weights(self, change: Callable[[], None], version: int, *, requests: RequestsAtSwap = "finish") -> None:
        """Have `change` alter the weights in place, where the model is that of a trainer in this process."""
        self.engine.engine.swap(version, change, requests)

    def params(self, **changes: Any) -> SamplingParams:
        """Return sampling parameters: the model's defaults, with changes."""
        return SamplingParams(**{**self.model.defaults, **changes})

    def _run(
        self,
        numbers: dict[str, int],
        results: list[Generated],
        on_done: Callable[[int, Generated], None] | None,
    ) -> None:
        left = {number: len(result.outputs) for number, result in enumerate(results)}
        while any(left.values()):
            for part in self.engine.step():
                output = part.output
                number = numbers.get(output.request_id)
                if number is None:
                    continue
                completion = results[number].outputs[output.index]
                completion.text += part.text
                if output.token_id is not None:
                    completion.token_ids.append(output.token_id)
                if output.logprobs is not None:
                    completion.logprobs.append(output.logprobs)
                if output.kept is not None:
                    completion.kept.append(output.kept)
                if output.prompt_logprobs is not None:
                    results[number].prompt_logprobs = output.prompt_logprobs
                if output.finish is not None:
                    completion.finish_reason = output.finish
                    left[number] -= 1
                    if left[number] == 0 and on_done is not None:
                        on_done(number, results[number])
            if self._on_step is not None:
                self._on_step()
