"""GPT-2: learned positions, LayerNorm, biases everywhere, an ungated feed-forward."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import attention_tensors, checked, costs
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.rope import given
from headway.recipe.section import Positive

Activation = Literal["gelu", "gelu_tanh"]
"""GELU, exact or with the tanh approximation."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
"""Hugging Face activation names; the first of each kind is the one written."""
NUMBERS = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "dim": ("n_embd", "hidden_size"),
    "heads": ("n_head", "num_attention_heads"),
    "positions": ("n_positions", "max_position_embeddings"),
}
"""Size fields, with their keys in a config.json and alternative keys."""


class GPT2(Model):
    """A decoder of the GPT-2 family."""

    NAMES: ClassVar[dict[str, str]] = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    OUTSIDE: ClassVar[dict[str, str]] = {
        "embed.weight": "transformer.wte.weight",
        "embed.positions.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    }
    LAYERS: ClassVar[str] = "transformer.h"
    OLD_NAMES: ClassVar[dict[str, str]] = {r"^(?=wte\.|wpe\.|ln_f\.|h\.)": "transformer."}
    FOLLOWS: ClassVar[str] = r".*\.attn\.(bias|masked_bias)"

    family: Literal["gpt2"] = "gpt2"
    positions: Positive = 1024
    """Rows of the position embedding: the longest sequence."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward."""
    scale_by_layer: bool = False
    """Divide attention scores by the layer number, from 1."""

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        return super()._follow(dim, heads) | {"hidden": 4 * dim}

    @model_validator(mode="after")
    def _even(self) -> Self:
        refuse_uneven(self)
        return self

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of gpt2."""
        refuse_quantized(config)
        if not given(config, "scale_attn_weights", True):
            raise ModelError("config.json has scale_attn_weights = false; this family scales attention scores")
        if config.get("add_cross_attention"):
            raise ModelError("config.json has add_cross_attention; this family is decoder-only")
        # reorder_and_upcast_attn only changes the order and precision of computing scores.
        return checked(cls, _sizes(config) | {
            "hidden": config.get("n_inner"),
            "activation": activation_of(config, "activation_function", "gelu_new"),
            "norm_eps": given(config, "layer_norm_epsilon", 1e-5),
            "tie_embeddings": given(config, "tie_word_embeddings", True),
            "init_std": given(config, "initializer_range", 0.02),
            "scale_by_layer": bool(config.get("scale_attn_by_inverse_layer_idx", False)),
        })  # fmt: skip

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gpt2, without dropout."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{key: getattr(self, field) for field, (key, _) in NUMBERS.items()},
            "n_inner": self.hidden,
            "activation_function": activation_name(self.activation),
            "layer_norm_epsilon": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.init_std,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": self.scale_by_layer,
            "reorder_and_upcast_attn": False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def architecture(self) -> Architecture:
        """Ungated feed-forward, biases and a position embedding."""
        return Architecture(
            **costs(self), gated=False, rotary=False, positions=self.positions, layer_norm=True, qkv_bias=True,
            output_bias=True, mlp_bias=True,
        )  # fmt: skip

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention, feed-forward."""
        return (
            layer_norm("attention_norm", self.dim)
            | attention_tensors(self, qkv_bias=True, output_bias=True)
            | layer_norm("mlp_norm", self.dim)
            | plain_mlp_tensors(self)
        )

    def tensors(self) -> Shapes:
        """Add the position embedding and the last norm's bias."""
        positions: Shapes = {"embed.positions.weight": (self.positions, self.dim)}
        bias: Shapes = {"norm.bias": (self.dim,)}
        return with_more(super().tensors(), {"embed.weight": positions, "norm.weight": bias})

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Matrices are transposed, and queries, keys and values fused."""
        shapes = self.tensors()
        for names in fused(shapes):
            name = names[0] if len(names) == 1 else names[0].replace(".q.", ".qkv.")
            rows = tuple(shapes[part][0] for part in names)
            if name.startswith("layers.") and len(shapes[names[0]]) == 2:
                yield HfTensor(self.hf_name(name), names, "transposed", rows=rows)
            else:
                yield HfTensor(self.hf_name(name), names, "rows" if len(names) > 1 else "same", rows=rows)

    @property
    def longest(self) -> int | None:
        """The number of positions."""
        return self.positions


def _sizes(config: Config) -> dict[str, Any]:
    """Return sizes from either of their keys."""
    candidates = {field: [config.get(name) for name in names] for field, names in NUMBERS.items()}
    missing = [NUMBERS[field][0] for field, values in candidates.items() if values == [None, None]]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    for field, (value, other) in candidates.items():
        if None not in (value, other) and value != other:
            raise ModelError(
                f"config.json has {NUMBERS[field][0]} {value} and {NUMBERS[field][1]} {other}, which are one"
            )
    return {field: other if value is None else value for field, (value, other) in candidates.items()}


# -- shared with GPT-NeoX


def refuse_quantized(config: Config) -> None:
    """Raise ModelError where a config's weights are no plain numbers."""
    if config.get("quantization_config"):
        raise ModelError("config.json describes quantized weights", hint="use the folder with the original weights")


def refuse_uneven(model: Model) -> None:
    """Raise ValueError unless heads have their own keys and values and split the width evenly."""
    if model.kv_heads != model.heads:
        raise ValueError(f"kv_heads ({model.kv_heads}) must equal heads ({model.heads})")
    if model.heads * model.head_dim != model.dim:
        raise ValueError(f"heads x head_dim ({model.heads} x {model.head_dim}) must equal dim ({model.dim})")


def activation_of(config: Config, key: str, default: str) -> Activation:
    """Return Headway's name of a config's activation."""
    name = given(config, key, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json has unknown {key} {name!r}", hint=f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: Activation) -> str:
    """Return the Hugging Face name of an activation."""
    return next(hf_name for hf_name, name in ACTIVATIONS.items() if name == activation)


def layer_norm(name: str, dim: int) -> Shapes:
    """Return the shapes of a norm with a bias."""
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def plain_mlp_tensors(model: Model) -> Shapes:
    """Return the shapes of an ungated feed-forward."""
    return linear("mlp.up", model.dim, model.hidden, True) | linear("mlp.down", model.hidden, model.dim, True)


def with_more(shapes: Shapes, more: Mapping[str, Shapes]) -> Shapes:
    """Return shapes with more inserted after some of them."""
    merged: Shapes = {}
    for name, shape in shapes.items():
        merged |= {name: shape, **more.get(name, {})}
    return merged


def fused(shapes: Shapes) -> Iterator[tuple[str, ...]]:
    """Yield tensor names, with queries, keys and values grouped."""
    for name in shapes:
        if ".attention.q." in name:
            yield tuple(name.replace(".q.", f".{part}.") for part in "qkv")
        elif not any(f".attention.{part}." in name for part in "kv"):
            yield (name,)
