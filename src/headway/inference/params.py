"""How a request is sampled: the parameters that the Python API, the server and the command line share."""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from headway.errors import RequestError, suggest, what_is_wrong

MOST_LOGPROBS = 20
MOST_STOPS = 16


class SamplingParams(BaseModel):
    """Sampling of one request. Everything applies in this order: bias, penalties, temperature, top-k, top-p, min-p."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens to generate at most; by default, up to the model's length."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """Logits are divided by it; at 0 the likeliest token is taken."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens whose probabilities add up to it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Positive logits of tokens in the prompt or output are divided by it, negative ones multiplied."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """The same, as often as they occur."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    """Added to the logits of these tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the output, which ends before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output."""
    include_stop: bool = False
    """Whether the output contains the text that ended it."""
    skip_special_tokens: bool = True
    """Whether the output's text leaves out special tokens, such as those of a chat template."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before which no end-of-text or stop token is sampled."""
    ignore_eos: bool = False
    """Go on after an end of text."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Outputs per prompt."""
    seed: int | None = None
    """The same seed gives the same random numbers at each position, whatever else is in the batch; output i of n has
    seed + i. By default, another one for every request."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Return log-probabilities of sampled tokens and of this many likeliest ones: those of the model itself, before
    bias, penalties, temperature and truncation; and the probability mass that truncation kept."""
    logprobs_at_temperature: bool = False
    """Divide logits by `temperature` for log-probabilities, too: those of the policy that samples, before bias,
    penalties and truncation. Temperature 0 counts as 1."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """The same of the prompt's tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.stop) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop texts, not {len(self.stop)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        return self

    @model_validator(mode="wrap")  # the last one, so that it is around the others
    @classmethod
    def _refuse(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise RequestError for a parameter that is unknown or has a wrong value; its facts have the name."""
        try:
            return validate(values)
        except ValidationError as invalid:
            mistake = invalid.errors()[0]
        name = str(mistake["loc"][0]) if mistake["loc"] else None
        if name is not None and mistake["type"] == "extra_forbidden":
            hint = suggest(name, cls.model_fields, "docs/inference.md has all")
            error = RequestError(f"unknown parameter {name!r}", hint=hint)
        else:
            error = RequestError(what_is_wrong(mistake) if name is None else f"{name}: {what_is_wrong(mistake)}")
        error.facts = {"param": name}
        raise error

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by for log-probabilities."""
        return (self.temperature or 1.0) if self.logprobs_at_temperature else 1.0

    @property
    def penalized(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
