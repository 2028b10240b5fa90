"""The rl section of a recipe: how answers are sampled and scored for reinforcement learning."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.recipe.own_code import OWN_NAME
from headway.recipe.section import NotNegative, Positive, Section

Share = Annotated[float, Field(ge=0, le=1)]


class RewardTerm(Section):
    """One source of an answer's reward."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """`math`, `countdown`, `json`, `regex`, `code`; or a function of your own, `package.module:name`."""
    weight: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """Its factor in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments besides the answer and the prompt's fields."""


class Overlong(Section):
    """A penalty of long answers (DAPO): from 0 where the last `buffer` tokens begin to -`penalty` at rl.max_tokens."""

    buffer: Positive
    """Tokens before the limit over which the penalty grows."""
    penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """At the limit."""


class Rl(Section):
    """How answers are sampled and scored; a step takes `train.batch` prompts."""

    samples: Annotated[int, Field(ge=1, le=1024, strict=True)] = 8
    """Answers to each prompt: a group."""
    max_tokens: Positive = 256
    """Tokens of an answer at most, those of an environment's replies included; data.seq holds a prompt and its
    answer."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of sampling; the trainer's log-probabilities are at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """See the sampling parameters of inference; below 1 the sampler's distribution is not the trainer's."""
    top_k: NotNegative = 0
    """As top_p; 0 for all."""
    rewards: tuple[RewardTerm, ...] = ()
    """What an answer's reward is the weighted sum of; none are needed with an environment, whose own are added."""
    environment: Annotated[str, Field(pattern=OWN_NAME)] | None = None
    """A multi-turn environment of your own, `package.module:Class`; without it, an answer is one turn."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    turns: Positive = 8
    """Turns of the model in an environment at most."""
    updates: Positive = 1
    """Optimizer steps per batch of rollouts: so many steps' prompts are sampled at once, with the same weights."""
    staleness: NotNegative = 0
    """Answers are sampled so many batches of rollouts ahead: with weights that are older by as many."""
    generators: NotNegative = 0
    """Processes that sample while the worker trains, per worker of the run; with 0 it samples and trains in turns. They
    need staleness: what they sample is learnt from later."""
    dynamic_sampling: bool = False
    """Leave out groups whose answers all have the same reward, and sample further prompts in their place (DAPO)."""
    dynamic_rounds: Positive = 4
    """Rounds of further prompts at most; what is missing then is left out of the step."""
    overlong: Overlong | None = None
    """A penalty of long answers."""
    mask_truncated: bool = False
    """Leave answers without an end out of the loss: those cut at max_tokens or at turns."""
    reward_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How long scoring one answer may take, or one reply of an environment."""
    reward_workers: Positive = 2
    """Processes that score, per worker of the run; an environment has as many of its own."""
    if_reward_fails: Literal["zero", "leave-out", "stop"] = "zero"
    """What an answer is worth if its reward or environment raises, hangs or returns no finite number: 0 of that term;
    nothing, as if it had not been sampled; or the run stops."""
    if_prompt_long: Literal["leave-out", "stop"] = "leave-out"
    """What happens to prompts that leave no room for max_tokens in data.seq."""
    if_no_variance: Literal["go-on", "stop"] = "go-on"
    """What happens when no group of a batch has answers of different rewards, so that there is nothing to learn."""
    keep_rollouts: NotNegative = 0
    """Batches of rollouts to keep in the run folder; 0 keeps all."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Turn names of rewards into terms."""
        if not isinstance(values, Mapping) or "rewards" not in values:
            return values
        rewards = values["rewards"]
        rewards = [rewards] if isinstance(rewards, str | Mapping) else rewards
        if not isinstance(rewards, list | tuple):
            return values
        return {**values, "rewards": [{"name": term} if isinstance(term, str) else term for term in rewards]}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.rewards and self.environment is None:
            raise ValueError("rewards is empty: name at least one, such as countdown")
        names = [term.name for term in self.rewards]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards names {twice} twice: give it once, with a larger weight")
        if self.overlong is not None and self.overlong.buffer > self.max_tokens:
            raise ValueError(f"overlong.buffer is {self.overlong.buffer}, but max_tokens is {self.max_tokens}")
        if self.generators and not self.staleness:
            raise ValueError(f"generators is {self.generators}, but staleness is 0: set it to 1 or more")
        if self.environment is None and self.environment_args:
            raise ValueError("environment_args has no effect without environment")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused: tuple[str, ...] = () if self.environment is not None else ("environment_args", "turns")
        unused += () if self.generators else ("generators",)
        return {key: value for key, value in handler(self).items() if key not in unused}
