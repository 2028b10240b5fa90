"""The model families by name. A new one is a file here and a torch module in `models/` or `models/diffusion/`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from headway.recipe.families.deepseek import DeepSeekV3
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.families.dit import DiT
from headway.recipe.families.gemma import Gemma, Gemma2, Gemma3
from headway.recipe.families.gpt2 import GPT2
from headway.recipe.families.gpt_oss import GptOss
from headway.recipe.families.llama import Llama
from headway.recipe.families.mistral import Mistral
from headway.recipe.families.mixtral import Mixtral
from headway.recipe.families.neox import NeoX
from headway.recipe.families.olmo2 import OLMo2
from headway.recipe.families.phi3 import Phi3
from headway.recipe.families.qwen3_moe import Qwen3Moe
from headway.recipe.families.smollm3 import SmolLM3
from headway.recipe.families.wan import Wan
from headway.recipe.model import CustomModel, Model

__all__ = [
    "DIFFUSERS",
    "DIFFUSION",
    "FAMILIES",
    "MODEL_TYPES",
    "AnyModel",
    "class_of",
    "families_with",
    "family_name",
    "family_names",
]

MODEL_TYPES: dict[str, type[Model]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Llama,
    "qwen3": Llama,
    "smollm3": SmolLM3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "olmo2": OLMo2,
    "phi3": Phi3,
    "gpt2": GPT2,
    "gpt_neox": NeoX,
    "mixtral": Mixtral,
    "qwen3_moe": Qwen3Moe,
    "deepseek_v3": DeepSeekV3,
    "gpt_oss": GptOss,
}
"""By the model_type of a config.json."""

FAMILIES: dict[str, type[Model]] = {
    name: kind for name, kind in MODEL_TYPES.items() if name == kind.model_fields["family"].default
}
"""The decoders, by `model.family` of a recipe."""

DIFFUSION: dict[str, type[DiffusionModel]] = {"dit": DiT, "wan": Wan}
"""The diffusion transformers, likewise."""

DIFFUSERS: dict[str, type[DiffusionModel]] = {kind.CLASS: kind for kind in DIFFUSION.values()}
"""By the _class_name of a diffusers config.json."""

_ALL: dict[str, type[Model]] = {**FAMILIES, **DIFFUSION}


def family_names() -> tuple[str, ...]:
    """Return every value of `model.family`."""
    return tuple(_ALL)


def family_name(values: Any) -> str:
    """Return the family of a model section: `own` for a custom class, llama by default."""
    if isinstance(values, Model):
        return values.family
    if not isinstance(values, Mapping):
        return "llama"
    if values.get("class") is not None or values.get("class_") is not None:
        return "own"
    return str(values.get("family") or "llama")


def families_with(key: str) -> list[str]:
    """Return the families with a key; nothing if all have it."""
    names = [name for name, kind in _ALL.items() if key in kind.model_fields and key not in kind.ABSENT]
    return names if len(names) < len(_ALL) else []


def class_of(values: Mapping[str, Any]) -> type[Model]:
    """Return the section class for values; an unknown family is left for validation."""
    return CustomModel if family_name(values) == "own" else _ALL.get(family_name(values), Llama)


def _tag(values: Any) -> str:
    name = family_name(values)
    return name if name in _ALL or name == "own" else "llama"


if TYPE_CHECKING:
    AnyModel = Model
else:
    AnyModel = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in {**_ALL, "own": CustomModel}.items())],  # noqa: UP007
        Discriminator(_tag),
    ]
    """A model section, of the class of its `family`."""
