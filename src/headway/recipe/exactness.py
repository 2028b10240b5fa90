"""Which runs compute in exact mode if their recipe leaves `inference.exact` open, and which cannot."""

from typing import Literal

from headway.errors import RecipeError
from headway.recipe.families.llama import LlamaLike
from headway.recipe.policy import PolicyGradient
from headway.recipe.schema import Recipe

FAMILIES = ("llama", "mistral", "phi3", "smollm3")
"""Those whose cost is known: dense ones that the engine's fused kernels run."""
EXACT_FAMILIES = (*FAMILIES, "mixtral", "olmo2", "qwen3_moe")
"""All that exact mode takes."""
PRECISIONS = {"cpu": "float32", "cuda": "bfloat16"}
"""That of products, by kind of device."""
HEADS = (64, 128)
"""Sizes of heads that kernels of exact mode take on GPUs."""
MULTIPLE = 16
"""Inputs of a matrix are a multiple of this there."""
WIDEST = 16384
"""Of a norm there."""


def with_exactness(recipe: Recipe, device: Literal["cpu", "cuda"]) -> Recipe:
    """Return the recipe with `inference.exact` decided: as it says, or if it is open, on for reinforcement learning
    where that costs a few percent. That was measured for dense models in bfloat16 on a GPU (docs/rl.md)."""
    if recipe.inference.exact is not None:
        return recipe
    exact = device == "cuda" and isinstance(recipe.objective, PolicyGradient) and _takes(recipe)
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update={"exact": exact})})


def check_exactness(recipe: Recipe, device: Literal["cpu", "cuda"]) -> None:
    """Raise RecipeError if a run in exact mode has a family or a precision that it does not take."""
    if not recipe.inference.exact:
        return
    if recipe.model.family not in EXACT_FAMILIES:
        raise RecipeError(
            f"exact mode does not support {recipe.model.family} yet",
            hint="it knows llama, mistral, qwen2, qwen3, smollm3, phi3, olmo2, mixtral and qwen3_moe: leave "
            "inference.exact out",
        )
    needed = PRECISIONS[device]
    if recipe.train.dtype != needed:
        where = "CPU" if device == "cpu" else "GPU"
        raise RecipeError(
            f"inference.exact on a {where} is for {needed}, not {recipe.train.dtype}",
            hint=f"--set train.dtype={needed}",
        )


def _takes(recipe: Recipe) -> bool:
    model, lora = recipe.model, recipe.lora
    if model.family not in FAMILIES or not isinstance(model, LlamaLike) or model.class_ is not None:
        return False
    if recipe.train.dtype != "bfloat16" or recipe.train.compile or (recipe.parallel and recipe.parallel.splits_model):
        return False
    if model.head_dim not in HEADS or model.rotary_dim != model.head_dim or model.switch_length is not None:
        return False
    inputs = [model.dim, model.hidden, model.heads * model.head_dim, *([] if lora is None else [lora.rank])]
    quantized = lora is not None and lora.quantize is not None
    return model.dim <= WIDEST and not quantized and not any(size % MULTIPLE for size in inputs)
