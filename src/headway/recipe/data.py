"""The data section of a recipe: one dataset, or a mixture whose weights may change at given steps."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from headway.recipe.media import Media
from headway.recipe.section import NotNegative, Positive, Section

Weight = Annotated[float, Field(ge=0, le=1e9)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


def _number_or_pairs(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate either form of a weight; raise one error for both."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(f"expected a number of at least 0 or [step, weight] pairs, got {value!r}") from None


def _check_weight_steps(weight: float | tuple[tuple[int, float], ...]) -> float | tuple[tuple[int, float], ...]:
    """Check that (step, weight) pairs start at step 1 and ascend."""
    if isinstance(weight, float):
        return weight
    if not weight or weight[0][0] > 1:
        raise ValueError("a changing weight must start at step 1: [[1, 0.7], [1000, 0.5]]")
    for (before, _), (step, _) in pairwise(weight):
        if step <= max(before, 1):
            raise ValueError(f"step {step} is not after step {max(before, 1)}")
    return weight


class MixturePart(Section):
    """One dataset of a mixture."""

    path: str
    """Folder made by `headway data build`."""
    version: str | None = None
    """Refuse to train on any other version of it (a prefix of at least 8 characters is enough)."""
    weight: Annotated[
        Weight | tuple[tuple[NotNegative, Weight], ...],
        WrapValidator(_number_or_pairs),
        AfterValidator(_check_weight_steps),
    ] = 1.0
    """Its share of the samples, relative to the other weights; or (step, weight) pairs, each valid from its step on."""

    def weight_at(self, step: int) -> float:
        """Return its weight at a step, from 1."""
        if isinstance(self.weight, float):
            return self.weight
        return next(weight for first, weight in reversed(self.weight) if step >= first)

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps at which its weight changes."""
        return () if isinstance(self.weight, float) else tuple(step for step, _ in self.weight[1:])


def _check_skip_ranges(skip: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Check that ranges are non-empty, ascending and disjoint."""
    before = 0
    for first, end in skip:
        if first >= end:
            raise ValueError(f"[{first}, {end}] is empty: the second number is the first sample after the range")
        if first < before:
            raise ValueError(f"[{first}, {end}] overlaps the previous range, which ends at {before}")
        before = end
    return skip


class Data(Section):
    """The dataset, and how it is cut into sequences, or of images and video into samples."""

    kind: Literal["text", "image", "video"] = "text"
    """What the dataset holds: text (chats included), images or video."""
    path: str | None = None
    """Folder made by `headway data build`."""
    mixture: dict[Name, MixturePart] = Field(default_factory=dict)
    """Several datasets instead of one, by names of your choice, each with a share of the samples."""
    version: str | None = None
    """Refuse to train on any other version of the data (a prefix of at least 8 characters is enough)."""
    seq: Positive = 1024
    """Tokens per training sequence."""
    holdout: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Share of windows, conversations or prompts held out for evaluation; the same ones for every seed."""
    mask_boundaries: bool = False
    """Mask the loss of tokens that would be predicted from another document's end."""
    within_documents: bool = True
    """Restrict attention to documents: no token of a window attends to another document."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Of chats, what the loss counts: all turns of the assistant, the last one of each conversation, or all tokens."""
    over_length: Literal["drop", "truncate", "split"] = "drop"
    """Of chats, what happens to samples of more than `seq` tokens: they are left out, lose their end, or become several
    samples."""
    skip: Annotated[tuple[tuple[NotNegative, Positive], ...], AfterValidator(_check_skip_ranges)] = ()
    """Samples to skip, as [first, end) ranges of sample numbers in the run. A step whose batch would touch some of them
    starts after them; of prompts, exactly these are skipped."""

    media: Media | None = None
    """Of images and video: sizes, frames and captions of samples."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Turn a list of datasets into a table, named after their folders where they have no name; show the defaults of
        media."""
        if isinstance(values, Mapping) and isinstance(values.get("mixture"), list | tuple):
            values = {**values, "mixture": _by_name(values["mixture"])}
        if isinstance(values, Mapping) and values.get("kind") in ("image", "video") and values.get("media") is None:
            values = {**values, "media": {}}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_media()
        if self.path is None and not self.mixture:
            raise PydanticCustomError("missing", "data.path is missing")
        if self.path is not None and self.mixture:
            raise ValueError("path and mixture exclude each other: remove one of them")
        for step in self.changes:
            if self.mixture and not any(part.weight_at(step) for part in self.mixture.values()):
                raise ValueError(f"all weights of the mixture are 0 from step {step} on")
        return self

    def _check_media(self) -> None:
        if self.kind == "text":
            if self.media is not None:
                raise ValueError("media is for images and video: set kind")
            return
        if self.mixture:
            raise ValueError(f"a mixture is of text; kind is {self.kind}")
        if self.kind == "image" and self.media is not None and self.media.frames != (1,):
            raise ValueError("media.frames is for video; an image is one frame")

    @model_serializer(mode="wrap")
    def _without_unused_key(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize `path` or `mixture`, whichever is used, and of text nothing about media."""
        unused = {"path" if self.mixture else "mixture", *(("kind", "media") if self.kind == "text" else ())}
        return {key: value for key, value in handler(self).items() if key not in unused}

    @property
    def changes(self) -> list[int]:
        """Steps at which a mixture's weights change, including the first step."""
        return sorted({1, *(step for part in self.mixture.values() for step in part.changes)})

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The datasets by name; a single one is named after its folder."""
        if self.path is None:
            return dict(self.mixture)
        return {PurePath(self.path).name or "data": MixturePart(path=self.path, version=self.version)}


def _by_name(parts: Any) -> dict[str, Any]:
    """Return datasets by name, by default their folders'; invalid values are left for validation."""
    named: dict[str, Any] = {}
    for index, part in enumerate(parts):
        rest = dict(part) if isinstance(part, Mapping) else {"path": part}
        folder = PurePath(str(rest.get("path", index))).name
        name = str(rest.pop("name", None) or re.sub(r"[^A-Za-z0-9_-]", "-", folder))
        if name in named:
            raise ValueError(f"two datasets of the mixture are named {name}: set name")
        named[name] = rest
    return named
