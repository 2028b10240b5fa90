"""The lora section of a recipe: low-rank adapters on linear layers of a frozen base, by names and shapes.

An adapter of a linear layer with weight W [out, in] is A [r, in] and B [out, r]: the layer computes
(W + scale B A) x, where scale is alpha / r, or alpha / sqrt(r) for rsLoRA. Only A and B are trained and saved.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.errors import RecipeError
from headway.recipe.model import Model, Shapes
from headway.recipe.patterns import matches
from headway.recipe.section import DERIVED, Positive, Section

A, B = "lora_a", "lora_b"
"""Names of an adapter's two matrices, parameters of the layer that they adapt."""
BLOCKS = "layers."
UNADAPTED = ("router", "kv_up")
"""Layers whose weight a model uses without calling the layer."""


class Lora(Section):
    """Low-rank adapters (LoRA) on the linear layers of a frozen base, which `model.init` names."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = DERIVED
    """Adapters are scaled by alpha / rank; by default alpha is twice the rank."""
    rslora: bool = False
    """Rank-stabilized: scale by alpha / sqrt(rank) instead."""
    targets: tuple[str, ...] = ()
    """Linear layers with adapters; `*` matches one part of a name, `**` any number; by default all of the blocks."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are zero in a training step, at random; the others are scaled up."""
    quantize: Literal["nf4"] | None = None
    """Store the base's linear layers in 4-bit NormalFloat (QLoRA), in blocks of 64 values."""
    init: str | None = None
    """A folder of PEFT's that the adapters start from; by default A is random and B is zero."""
    base: str | None = None
    """Digest of the base's weights; filled in when a run starts, and compared when it is resumed."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("alpha") is None:
            rank = values.get("rank", cls.model_fields["rank"].default)
            values = {**values, "alpha": 2.0 * rank if isinstance(rank, int) else 1.0}
        return values

    def starting_from(self, stored: Mapping[str, Any]) -> "Lora":
        """Return these settings with those of stored adapters; raise RecipeError for another stated value."""
        defaults = Lora(rank=self.rank).model_dump() | {"rank": Lora.model_fields["rank"].default}
        if self.dropout:  # how they are trained, not what they are: the recipe's counts
            stored = {**stored, "dropout": self.dropout}
        for key, value in stored.items():
            if getattr(self, key) not in (value, defaults[key]):
                raise RecipeError(
                    f"lora.{key} is {getattr(self, key)} in the recipe and {value} in {self.init}",
                    hint=f"leave lora.{key} out: lora.init gives it",
                )
        return self.model_copy(update=dict(stored))

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapted_layers(model: Model, targets: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of the layers that get adapters, in module order; raise RecipeError for a target that has no
    linear layer."""
    shapes = model.tensors()
    modules = {name.rpartition(".")[0] for name in shapes}
    linear = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.startswith(BLOCKS) and name.endswith(".weight") and len(shape) == 2 and not _is_unadapted(name)
    ]
    chosen = set[str]()
    for target in targets:
        of_target = {name for name in linear if matches(target, name)}
        if not of_target:
            raise _no_layer(target, linear, modules)
        chosen |= of_target
    return tuple(name for name in linear if not targets or name in chosen)


def adapter_tensors(model: Model, lora: Lora) -> Shapes:
    """Return the shapes of all adapters by name, in module order."""
    weights, shapes = model.tensors(), Shapes()
    for layer in adapted_layers(model, lora.targets):
        outputs, inputs = weights[f"{layer}.weight"]
        shapes |= {f"{layer}.{A}": (lora.rank, inputs), f"{layer}.{B}": (outputs, lora.rank)}
    return shapes


def _is_unadapted(name: str) -> bool:
    return name.split(".")[-2] in UNADAPTED


def _no_layer(target: str, linear: list[str], modules: set[str]) -> RecipeError:
    others = sorted(name for name in modules if matches(target, name))
    plain = sorted({re.sub(r"\b\d+\b", "*", name) for name in linear})
    if others:
        return RecipeError(
            f"lora.targets: {target!r} matches {others[0]}, which is not a linear layer of a block",
            hint=f"it may be any of {', '.join(plain)}",
        )
    near = difflib.get_close_matches(target, plain, n=3, cutoff=0.3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it may be any of {', '.join(plain)}"
    return RecipeError(f"lora.targets: no layer of the model matches {target!r}", hint=hint)
