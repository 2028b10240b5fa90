"""The fp8 section of a recipe: which linear layers are multiplied in float8, by names and shapes."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headway.errors import RecipeError
from headway.recipe.lora import BLOCKS, UNADAPTED
from headway.recipe.model import Model
from headway.recipe.patterns import Pattern, matches
from headway.recipe.section import Section

MULTIPLE = 16
"""Sizes of float8 products are multiples of this."""
EXPERTS = re.compile(r"(.*)\.(gate|up|down)")
"""Stacks of experts' matrices."""


class Fp8(Section):
    """Multiply linear layers of blocks in float8; weights, gradients and optimizer states keep their precision."""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for a tensor, or one per row: slower, and closer where a few numbers are far larger than the rest."""
    gradients: Literal["e5m2", "e4m3"] = "e5m2"
    """Format of output gradients: e5m2 has more range, e4m3 one more bit of precision."""
    layers: tuple[Pattern, ...] = ()
    """Layers in float8; `*` matches one part of a name, `**` any number; by default all linear layers and experts of
    the blocks. Those whose sizes are no multiples of 16 are left out and named."""
    skip: tuple[Pattern, ...] = ()
    """Layers to leave out."""
    gather: bool = True
    """Gather sharded weights in float8: half of the bytes of bfloat16. No effect with rowwise scaling."""
    alarm: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Record an alarm where more than this share of a layer's inputs or gradients becomes zero, or 1 % does not fit."""


@dataclass(frozen=True)
class Fp8Layers:
    """A model's layers by whether they are in float8."""

    chosen: tuple[str, ...]
    """In module order; experts by the name of their module."""
    skipped: Mapping[str, str]
    """Why others of the blocks' linear layers are not."""

    def describe(self) -> str:
        """Return how many layers are in float8, and which are not: one name stands for those of all blocks."""
        alike = dict[str, str]()
        for name, why in self.skipped.items():
            alike.setdefault(re.sub(r"\b\d+\b", "*", name), why)
        left = "; ".join(f"{name}: {why}" for name, why in alike.items())
        return f"fp8: {len(self.chosen)} layers" + (f", without {left}" if left else "")


def fp8_layers(model: Model, fp8: Fp8) -> Fp8Layers:
    """Return which layers of a model are in float8; raise RecipeError for a pattern without a layer."""
    shapes = _linear_shapes(model)
    for key in ("layers", "skip"):
        for pattern in getattr(fp8, key):
            if not any(matches(pattern, name) for name in shapes):
                raise _no_layer(key, pattern, shapes)
    asked = {name: sizes for name, sizes in shapes.items() if not fp8.layers or _any_matches(fp8.layers, name)}
    skipped = {name: why for name, sizes in asked.items() if (why := _reason(name, sizes, fp8.skip)) is not None}
    chosen = tuple(name for name in asked if name not in skipped)
    if not chosen:
        name, why = next(iter(skipped.items()), ("model", "it has no linear layer in a block"))
        raise RecipeError(f"train.fp8: no layer is left: {name}: {why}", hint="leave [train.fp8] out")
    return Fp8Layers(chosen, skipped)


def _linear_shapes(model: Model) -> dict[str, set[int]]:
    """Return the sizes of the blocks' linear layers and experts, by module."""
    sizes = dict[str, set[int]]()
    for name, shape in model.tensors().items():
        experts = EXPERTS.fullmatch(name)
        if not name.startswith(BLOCKS):
            continue
        if len(shape) == 2 and name.endswith(".weight"):
            sizes[name.removesuffix(".weight")] = set(shape)
        elif len(shape) == 3 and experts is not None:
            sizes.setdefault(experts[1], set()).update(shape[1:])
    return sizes


def _reason(name: str, sizes: set[int], skip: Iterable[str]) -> str | None:
    """Return why a layer is left out, if it is."""
    if _any_matches(skip, name):
        return "train.fp8.skip"
    if name.rpartition(".")[2] in UNADAPTED:
        return "its weight keeps its precision" if name.endswith("router") else "its weight is used without the layer"
    odd = sorted(size for size in sizes if size % MULTIPLE)
    return f"{odd[0]} is no multiple of {MULTIPLE}" if odd else None


def _any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def _no_layer(key: str, pattern: str, names: Iterable[str]) -> RecipeError:
    plain = sorted({re.sub(r"\b\d+\b", "*", name) for name in names})
    near = difflib.get_close_matches(pattern, plain, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it may be any of {', '.join(plain)}"
    return RecipeError(f"train.fp8.{key}: no linear layer of a block matches {pattern!r}", hint=hint)
