"""GPT-2: learned positions, LayerNorm, biases everywhere, a feed-forward of two matrices."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import attention_tensors, checked, costs
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.rope import given
from headway.recipe.section import Positive

__all__ = [
    "GPT2",
    "Activation",
    "activation_name",
    "activation_of",
    "fused",
    "layer_norm",
    "plain_mlp_tensors",
    "refuse_quantized",
    "refuse_uneven",
    "with_more",
]

Activation = Literal["gelu", "gelu_tanh"]
"""The Gaussian error linear unit, or its approximation by tanh."""

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
}
"""What they call them, to ours; the first of a kind is what we write."""
NUMBERS = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "dim": ("n_embd", "hidden_size"),
    "heads": ("n_head", "num_attention_heads"),
    "positions": ("n_positions", "max_position_embeddings"),
}
"""What a config calls its sizes, and what it may also call them."""


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
    """Which family of decoders it is of."""
    positions: Positive = 1024
    """Rows of the table of positions: no sequence may be longer."""
    activation: Activation = "gelu_tanh"
    """What the feed-forward bends its inner numbers with."""
    scale_by_layer: bool = False
    """Divide the scores of attention by the layer's number, which is 1 for the first."""

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        return super()._follow(dim, heads) | {"hidden": 4 * dim}

    @model_validator(mode="after")
    def _even(self) -> Self:
        refuse_uneven(self)
        return self

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """That of a config.json of gpt2."""
        refuse_quantized(config)
        if not given(config, "scale_attn_weights", True):
            raise ModelError("config.json has scale_attn_weights off; this family divides by the root of a head's size")
        if config.get("add_cross_attention"):
            raise ModelError("config.json has add_cross_attention; this family is a decoder alone")
        # reorder_and_upcast_attn says in which order and precision the same scores are computed.
        return checked(cls, _sizes(config) | {
            "hidden": config.get("n_inner"),
            "activation": activation_of(config, "activation_function", "gelu_new"),
            "norm_eps": given(config, "layer_norm_epsilon", 1e-5),
            "tie_embeddings": given(config, "tie_word_embeddings", True),
            "init_std": given(config, "initializer_range", 0.02),
            "scale_by_layer": bool(config.get("scale_attn_by_inverse_layer_idx", False)),
        })  # fmt: skip

    def to_config(self, seq: int) -> dict[str, Any]:
        """A config of gpt2; it was trained without dropout."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(self, ours) for ours, (theirs, _) in NUMBERS.items()},
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
        """Two matrices in the feed-forward, biases, and a table of positions."""
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
        """Those of all decoders, positions, and the last norm's bias."""
        positions: Shapes = {"embed.positions.weight": (self.positions, self.dim)}
        bias: Shapes = {"norm.bias": (self.dim,)}
        return with_more(super().tensors(), {"embed.weight": positions, "norm.weight": bias})

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Matrices are turned round, and queries, keys and values lie in one."""
        shapes = self.tensors()
        for ours in fused(shapes):
            name = ours[0] if len(ours) == 1 else ours[0].replace(".q.", ".qkv.")
            rows = tuple(shapes[one][0] for one in ours)
            if name.startswith("layers.") and len(shapes[ours[0]]) == 2:
                yield HfTensor(self.hf_name(name), ours, "transposed", rows=rows)
            else:
                yield HfTensor(self.hf_name(name), ours, "rows" if len(ours) > 1 else "same", rows=rows)

    @property
    def longest(self) -> int | None:
        """As many tokens as the table has rows."""
        return self.positions


def _sizes(config: Config) -> dict[str, Any]:
    """Sizes under either of their names."""
    found = {ours: [config.get(name) for name in names] for ours, names in NUMBERS.items()}
    missing = [NUMBERS[ours][0] for ours, values in found.items() if values == [None, None]]
    if missing:
        raise ModelError(f"config.json has no {', '.join(missing)}")
    for ours, (one, other) in found.items():
        if None not in (one, other) and one != other:
            raise ModelError(f"config.json has {NUMBERS[ours][0]} {one} and {NUMBERS[ours][1]} {other}, which are one")
    return {ours: other if one is None else one for ours, (one, other) in found.items()}


# -- what GPT-NeoX is made of, too


def refuse_quantized(config: Config) -> None:
    """Raise ModelError where a config's weights are no plain numbers."""
    if config.get("quantization_config"):
        raise ModelError("config.json describes quantized weights", hint="use the folder with the original weights")


def refuse_uneven(model: Model) -> None:
    """Raise ValueError unless heads share the width out evenly, each with keys and values of its own."""
    if model.kv_heads != model.heads:
        raise ValueError(f"kv_heads ({model.kv_heads}) must be heads ({model.heads}): no heads share keys here")
    if model.heads * model.head_dim != model.dim:
        raise ValueError(f"heads x head_dim ({model.heads} x {model.head_dim}) must be dim ({model.dim})")


def activation_of(config: Config, key: str, default: str) -> Activation:
    """Our name of a config's activation."""
    name = given(config, key, default)
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json has {key} {name!r}, which is not known", hint=f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: Activation) -> str:
    """Their name of an activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def layer_norm(name: str, dim: int) -> Shapes:
    """The tensors of a norm with a bias."""
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def plain_mlp_tensors(model: Model) -> Shapes:
    """A feed-forward of two matrices."""
    return linear("mlp.up", model.dim, model.hidden, True) | linear("mlp.down", model.hidden, model.dim, True)


def with_more(shapes: Shapes, more: Mapping[str, Shapes]) -> Shapes:
    """Tensors in their order, with others behind some of them."""
    made: Shapes = {}
    for name, shape in shapes.items():
        made |= {name: shape, **more.get(name, {})}
    return made


def fused(shapes: Shapes) -> Iterator[tuple[str, ...]]:
    """Names of tensors, one at a time; those of queries, keys and values together."""
    for name in shapes:
        if ".attention.q." in name:
            yield tuple(name.replace(".q.", f".{part}.") for part in "qkv")
        elif not any(f".attention.{part}." in name for part in "kv"):
            yield (name,)
