"""Which tokens to train on: one data set, or several in shares that may change at given steps."""

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, Any, Self

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

from headway.recipe.section import NotNegative, Positive, Section

__all__ = ["Data", "MixturePart"]

Weight = Annotated[float, Field(ge=0, le=1e9)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


def _number_or_pairs(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Either kind, or one sentence for both of what is wrong."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(f"{value!r} is neither a number of 0 or more nor pairs of a step and such a number") from None


def _from_the_first_step(weight: float | tuple[tuple[int, float], ...]) -> float | tuple[tuple[int, float], ...]:
    """A weight, or what it is from which step on, from the first."""
    if isinstance(weight, float):
        return weight
    if not weight or weight[0][0] > 1:
        raise ValueError("a weight that changes says first what it is at step 1: [[1, 0.7], [1000, 0.5]]")
    for (before, _), (step, _) in pairwise(weight):
        if step <= max(before, 1):
            raise ValueError(f"step {step} does not come after step {max(before, 1)}")
    return weight


class MixturePart(Section):
    """One data set of a mixture."""

    path: str
    """Folder made by `headway data build`."""
    version: str | None = None
    """Refuse to train on any other version of it (a prefix of at least 8 characters is enough)."""
    weight: Annotated[
        Weight | tuple[tuple[NotNegative, Weight], ...],
        WrapValidator(_number_or_pairs),
        AfterValidator(_from_the_first_step),
    ] = 1.0
    """Its share of the samples, as a number in proportion to the others' weights; or (step, weight) pairs: from this
    step on it has that weight."""

    def weight_at(self, step: int) -> float:
        """Its weight at a step, from 1."""
        if isinstance(self.weight, float):
            return self.weight
        return next(weight for first, weight in reversed(self.weight) if step >= first)

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps from which on it has another weight."""
        return () if isinstance(self.weight, float) else tuple(step for step, _ in self.weight[1:])


def _in_order(skip: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of samples that follow each other."""
    before = 0
    for first, end in skip:
        if first >= end:
            raise ValueError(f"[{first}, {end}] holds no sample: the second number is the first sample after the range")
        if first < before:
            raise ValueError(f"[{first}, {end}] begins before the range ahead of it ends, at {before}")
        before = end
    return skip


class Data(Section):
    """Which tokens to train on, and how they are cut into sequences."""

    path: str | None = None
    """Folder made by `headway data build`."""
    mixture: dict[Name, MixturePart] = Field(default_factory=dict)
    """Several data sets instead of one, by names of your choice, each with a share of the samples."""
    version: str | None = None
    """Refuse to train on any other version of the data (a prefix of at least 8 characters is enough)."""
    seq: Positive = 1024
    """Tokens in one training sequence."""
    holdout: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Share of the windows kept out of training for evaluation; the same windows whatever the seed."""
    mask_boundaries: bool = False
    """Leave out of the loss each token that would be predicted from another document's end."""
    within_documents: bool = True
    """Attention stays within documents: no token of a window sees another document's."""
    skip: Annotated[tuple[tuple[NotNegative, Positive], ...], AfterValidator(_in_order)] = ()
    """Samples of the order that are passed over, as [first, end) by their number in the run. A step whose batch would
    touch some of them begins after them."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """A list of data sets is a table of them, called after their folders where they have no name."""
        if isinstance(values, Mapping) and isinstance(values.get("mixture"), list | tuple):
            return {**values, "mixture": _by_name(values["mixture"])}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.path is None and not self.mixture:
            raise PydanticCustomError("missing", "data.path is missing")
        if self.path is not None and self.mixture:
            raise ValueError("path names one data set and mixture several: leave one of them out")
        for step in self.changes:
            if self.mixture and not any(part.weight_at(step) for part in self.mixture.values()):
                raise ValueError(f"all weights of the mixture are 0 from step {step} on")
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With the one data set or with the several, not with both keys."""
        unused = "path" if self.mixture else "mixture"
        return {key: value for key, value in handler(self).items() if key != unused}

    @property
    def changes(self) -> list[int]:
        """The steps from which on a mixture has other weights than before, the first step included."""
        return sorted({1, *(step for part in self.mixture.values() for step in part.changes)})

    @property
    def parts(self) -> dict[str, MixturePart]:
        """The data sets by name; one that is alone is called after its folder."""
        if self.path is None:
            return dict(self.mixture)
        return {PurePath(self.path).name or "data": MixturePart(path=self.path, version=self.version)}


def _by_name(parts: Any) -> dict[str, Any]:
    """Data sets by the names that they have or their folders'; mistakes are left for the fields' own checks."""
    named: dict[str, Any] = {}
    for index, part in enumerate(parts):
        rest = dict(part) if isinstance(part, Mapping) else {"path": part}
        folder = PurePath(str(rest.get("path", index))).name
        name = str(rest.pop("name", None) or re.sub(r"[^A-Za-z0-9_-]", "-", folder))
        if name in named:
            raise ValueError(f"two data sets of the mixture are called {name}: give them names")
        named[name] = rest
    return named
