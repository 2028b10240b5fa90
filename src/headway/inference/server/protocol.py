"""Requests of the OpenAI API, with the extensions that vLLM's clients use; any other field is an error."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.inference.params import MOST_LOGPROBS, SamplingParams

Tokens = list[int]


class _Request(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool = False
    stream_options: "StreamOptions | None" = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    """Accepted and ignored."""
    # -- extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    def sampling(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """Return the sampling parameters: what the request says, else the model's defaults."""
        names = (
            "temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "top_k",
            "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "stop",
            "skip_special_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names} | {"include_stop": self.include_stop_str_in_output}
        fields = {name: value for name, value in (given | more).items() if value is not None}
        if fields.get("top_k") == -1:  # as vLLM says "all"
            fields["top_k"] = 0
        return SamplingParams.model_validate({**defaults, **fields})

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class StreamOptions(BaseModel):
    """What a stream says."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | Tokens | list[str | Tokens]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _supported(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be equal to n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 needs echo")
        if not self.prompts:
            raise ValueError("prompt is an empty list")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ResponseFormat(BaseModel):
    """Only text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def length(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
