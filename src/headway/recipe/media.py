"""The [data.media] section of a recipe: how clips become samples of images or video."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from headway.recipe.section import NotNegative, Positive, Section

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def _listed(value: Any) -> Any:
    """Accept a single value where several are allowed."""
    return [value] if isinstance(value, str | int) else value


def _listed_sizes(value: Any) -> Any:
    """Accept a single size; numbers become text, of which `_check_sizes` says what it should be."""
    listed = _listed(value)
    return [str(size) if isinstance(size, int) else size for size in listed] if isinstance(listed, list) else listed


def _check_sizes(sizes: tuple[str, ...]) -> tuple[str, ...]:
    for size in sizes:
        if _SIZE.fullmatch(size) is None:
            raise ValueError(f"{size!r} is not WIDTHxHEIGHT, for example 832x480")
    return _check_distinct(sizes)


def _check_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("it is empty")
    if len(set(values)) < len(values):
        raise ValueError("a value is listed twice")
    return values


class Media(Section):
    """How images or video become samples; for `data.kind` image or video."""

    sizes: Annotated[tuple[str, ...], BeforeValidator(_listed_sizes), AfterValidator(_check_sizes)] = ("64x64",)
    """Sizes of samples, WIDTHxHEIGHT; several are buckets, and each clip goes to the one of the nearest shape."""
    frames: Annotated[tuple[Positive, ...], BeforeValidator(_listed), AfterValidator(_check_distinct)] = (1,)
    """Frames per sample; several are buckets, and each clip goes to the longest that it has frames for."""
    stride: Positive = 1
    """Distance of a sample's frames in the clip: 2 takes every second one."""
    crop: Literal["center", "random"] = "center"
    """Where a clip of another shape is cut."""
    flip: bool = False
    """Mirror half of the samples, left to right; captions that name a side become wrong."""
    captions: Literal["random", "first", "none"] = "random"
    """Which of a clip's captions a sample gets; none: samples have no caption."""
    segment: Literal["clip", "gop"] = "clip"
    """What an epoch takes samples from: each clip, or each group of pictures that is long enough for a sample."""
    samples: Positive = 1
    """Samples per segment and epoch, at random places."""
    placement: Literal["adjacent", "spread"] = "adjacent"
    """Where the samples of a segment lie in it: one after another, which decodes least, or one in each equal part."""
    decoders: NotNegative | None = None
    """Processes per worker that decode ahead of the steps; 0: the worker decodes itself. By default 2 of video, 0 of
    images."""
    window: Positive | None = None
    """Steps within which the samples of a segment are trained on and decoded together; by default `samples`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.window is not None and self.window % self.samples:
            raise ValueError(f"window is {self.window}, not a multiple of samples, which is {self.samples}")
        return self

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(width, height, frames) of each bucket."""
        sizes = [tuple(map(int, size.split("x"))) for size in self.sizes]
        return tuple((width, height, frames) for width, height in sizes for frames in self.frames)

    @property
    def steps_per_window(self) -> int:
        """Steps within which the samples of a segment lie."""
        return self.window or self.samples
