"""The objective section of a recipe: what a run minimizes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from headway.recipe.diffusion import Ddpm, Flow
from headway.recipe.own_code import OWN_NAME
from headway.recipe.policy import PRESETS, PolicyGradient
from headway.recipe.section import Section

Beta = Annotated[float, Field(gt=0, le=100)]
Share = Annotated[float, Field(ge=0, lt=0.5)]


class Pretrain(Section):
    """Predict every next token."""

    kind: Literal["pretrain"] = "pretrain"
    """Which objective it is."""


class Sft(Section):
    """Supervised fine-tuning: predict the tokens that `data.loss_on` chooses, weighted by sample."""

    kind: Literal["sft"]
    """Which objective it is."""


class Dpo(Section):
    """Direct preference optimization, on pairs of a chosen and a rejected answer."""

    kind: Literal["dpo"]
    """Which objective it is."""
    beta: Beta = 0.1
    """How strongly the policy is held to the reference."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Of the margin: -log sigmoid, a hinge at 1, or IPO's square, whose log-probabilities are means over tokens."""
    smoothing: Share = 0.0
    """Share of pairs whose preference is assumed to be wrong (sigmoid only)."""
    reference_free: bool = False
    """Compare with a uniform reference instead of the model as it was at the start."""


class Orpo(Section):
    """Odds ratio preference optimization: cross-entropy of the chosen answer and an odds ratio; no reference."""

    kind: Literal["orpo"]
    """Which objective it is."""
    beta: Beta = 0.1
    """Weight of the odds ratio."""


class SimPo(Section):
    """Simple preference optimization: mean log-probabilities with a target margin, without a reference."""

    kind: Literal["simpo"]
    """Which objective it is."""
    beta: Beta = 2.0
    """Factor of the mean log-probabilities."""
    margin: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Target margin between the rewards of a pair (gamma in the paper)."""


class Kto(Section):
    """Kahneman-Tversky optimization, on answers that are labelled desirable or not."""

    kind: Literal["kto"]
    """Which objective it is."""
    beta: Beta = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of desirable answers."""
    undesirable_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of the others."""


class Reward(Section):
    """A reward model (Bradley-Terry), on pairs of a chosen and a rejected answer: a scalar for each document."""

    kind: Literal["reward"]
    """Which objective it is."""
    center: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps their mean near 0; 0.01 is usual."""


class Distill(Section):
    """Distillation: predict what a teacher predicts, on its likeliest tokens of each position."""

    kind: Literal["distill"]
    """Which objective it is."""
    teacher: Annotated[str, Field(min_length=1)]
    """The teacher: a Hugging Face folder, or RUN@STEP, with the tokenizer that the data was built with."""
    divergence: Literal["forward", "reverse"] = "forward"
    """KL of the student from the teacher (forward: cover all that it says), or of the teacher from the student."""
    top_k: Annotated[int, Field(ge=1, le=65536, strict=True)] = 64
    """Likeliest tokens of the teacher that are compared one by one; all others are compared as one."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of both distributions; the divergence is multiplied by its square."""
    next_token: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the next-token loss: the loss is 1 - next_token of the divergence, and next_token of cross-entropy."""
    mode: Literal["live", "cached"] = "live"
    """Run the teacher on every batch, beside the student; or once over all data, and store its tokens beside it."""
    digest: str | None = None
    """Digest of the teacher's weights; filled in when a run starts, and compared when it is resumed."""


class CustomObjective(Section):
    """An objective class of your own."""

    kind: Literal["custom"]
    """Which objective it is."""
    class_: Annotated[str, Field(alias="class", pattern=OWN_NAME)]
    """`package.module:Class`, importable where the run runs; see docs/post-training.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""

    @model_serializer(mode="wrap")
    def _by_alias(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"class" if key == "class_" else key: value for key, value in handler(self).items()}


KINDS: dict[str, type[Section]] = {
    "pretrain": Pretrain,
    "sft": Sft,
    "dpo": Dpo,
    "orpo": Orpo,
    "simpo": SimPo,
    "kto": Kto,
    "reward": Reward,
    "distill": Distill,
    "flow": Flow,
    "ddpm": Ddpm,
    "custom": CustomObjective,
    **dict.fromkeys(PRESETS, PolicyGradient),
}
"""By `objective.kind`."""


def _tag(values: Any) -> str:
    """Return the kind of an objective section; an unknown one is left for validation."""
    kind = values.get("kind") if isinstance(values, Mapping) else getattr(values, "kind", None)
    return str(kind) if kind in KINDS else "pretrain"


if TYPE_CHECKING:
    AnyObjective = (
        Pretrain | Sft | Dpo | Orpo | SimPo | Kto | Reward | Distill | Flow | Ddpm | CustomObjective | PolicyGradient
    )
else:
    AnyObjective = Annotated[
        Union[tuple(Annotated[section, Tag(kind)] for kind, section in KINDS.items())],  # noqa: UP007
        Discriminator(_tag),
    ]
    """An objective section, of the class of its `kind`."""
