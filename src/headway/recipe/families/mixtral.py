"""Mixtral: Llama whose feed-forward is a few of several experts, chosen for each token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture, ExpertShape
from headway.recipe.families.llama import (
    LlamaLike,
    attention_tensors,
    checked,
    common_config,
    mlp_tensors,
    refuse_what_differs,
    sizes,
)
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.rope import given, rope_settings, scaling_from
from headway.recipe.section import Positive

__all__ = ["Mixtral", "MixtureLike", "expert_tensors", "one_by_one"]


class MixtureLike(LlamaLike):
    """What mixtures with softmax routers share."""

    UNCUT: ClassVar[str] = "experts are not shared over a tensor axis yet"

    EXPERTS: ClassVar[dict[str, str]] = {}
    """Stacks of experts' matrices: ours to those of a Hugging Face folder, which has each by itself."""

    mlp_bias: Literal[False] = False
    """Feed-forwards have no biases."""
    experts: Positive = 8
    """Feed-forwards of a layer."""
    top_k: Positive = 2
    """How many of them each token is sent to."""
    balance: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the auxiliary loss that sends about as many tokens to each expert; its gradient is added, the recorded
    loss is without it."""
    window: Positive | None = None
    """Tokens that each token sees, itself included; by default all."""

    @model_validator(mode="after")
    def _some_of_all(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most the number of experts ({self.experts})")
        return self

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.hidden

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is of experts."""
        return 0 <= layer < self.layers

    @property
    def mixtures(self) -> int:
        """How many layers have experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))

    def window_of(self, layer: int) -> int | None:
        """The same in all layers."""
        return self.window

    def architecture(self) -> Architecture:
        """Experts, and windows."""
        windowed = sum(self.window_of(layer) is not None for layer in range(self.layers))
        dense = self.layers - self.mixtures
        return replace(
            super().architecture(),
            experts=ExpertShape(self.experts, self.top_k, self.expert_width, dense_layers=dense),
            window=self.window,
            windowed_layers=windowed,
        )

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention, and experts or one feed-forward."""
        shapes: Shapes = {"attention_norm.weight": (self.dim,)}
        shapes |= attention_tensors(self, self.qkv_bias, self.output_bias)
        if self.qk_norm:
            shapes |= {"attention.q_norm.weight": (self.head_dim,), "attention.k_norm.weight": (self.head_dim,)}
        shapes["mlp_norm.weight"] = (self.dim,)
        return shapes | (expert_tensors(self) if self.has_experts(layer) else mlp_tensors(self))

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Every expert's matrices by themselves."""
        for name in self.tensors():
            yield from one_by_one(self, name, self.EXPERTS) or (HfTensor(self.hf_name(name), (name,)),)

    @classmethod
    def _described(cls, config: Config, theta: float, kv_heads: int, eps: float) -> dict[str, Any]:
        """What configs of mixtures have in common; where one says nothing, its family's own numbers."""
        rope = rope_settings(config, theta)
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(f"config.json rotates {rope['partial_rotary_factor']} of each head; this family does all")
        return sizes(config) | {
            "kv_heads": given(config, "num_key_value_heads", kv_heads),
            "head_dim": config.get("head_dim"),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "norm_eps": given(config, "rms_norm_eps", eps),
            "tie_embeddings": given(config, "tie_word_embeddings", False),
            "init_std": given(config, "initializer_range", 0.02),
            "balance": given(config, "router_aux_loss_coef", 0.001),
        }

    def _common(self, kind: str, seq: int) -> dict[str, Any]:
        """The keys that they have in common."""
        return common_config(self, kind, seq) | {
            "num_experts_per_tok": self.top_k,
            "router_aux_loss_coef": self.balance,
        }


class Mixtral(MixtureLike):
    """A decoder of the Llama family of which each layer has several feed-forwards."""

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {"mlp.router": "block_sparse_moe.gate"}
    EXPERTS: ClassVar[dict[str, str]] = {
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }

    family: Literal["mixtral"] = "mixtral"
    """Which family of decoders it is of."""
    qk_norm: Literal[False] = False
    """Queries and keys are not normalized."""
    qkv_bias: Literal[False] = False
    """Queries, keys and values have no biases."""
    output_bias: Literal[False] = False
    """Nor has what attention makes."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Every layer has experts; they may look through a window."""
        refuse_what_differs(config)
        if config.get("router_jitter_noise"):
            raise ModelError("config.json has router_jitter_noise, which is not known", hint="0 leaves it out")
        return checked(
            cls,
            cls._described(config, theta=1e6, kv_heads=8, eps=1e-5)
            | {
                "experts": given(config, "num_local_experts", 8),
                "top_k": given(config, "num_experts_per_tok", 2),
                "window": config.get("sliding_window"),
            },
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """A config of mixtral."""
        return self._common("mixtral", seq) | {
            "num_local_experts": self.experts,
            "router_jitter_noise": 0.0,
            "sliding_window": self.window,
        }


# -- what other families are made of, too


def expert_tensors(model: MixtureLike, bias: bool = False) -> Shapes:
    """A router, and experts that lie stacked."""
    count, dim, hidden = model.experts, model.dim, model.expert_width
    shapes = linear("mlp.router", dim, count, bias) | {
        "mlp.experts.gate": (count, hidden, dim),
        "mlp.experts.up": (count, hidden, dim),
        "mlp.experts.down": (count, dim, hidden),
    }
    if bias:
        shapes |= {f"mlp.experts.{name}_bias": (count, hidden) for name in ("gate", "up")}
        shapes["mlp.experts.down_bias"] = (count, dim)
    return shapes


def one_by_one(model: MixtureLike, name: str, experts: dict[str, str]) -> tuple[HfTensor, ...]:
    """The tensors of a folder that hold one of our stacks, an expert each; none where it is no stack."""
    parts = name.split(".", 2)
    theirs = experts.get(parts[-1]) if parts[0] == "layers" else None
    if theirs is None:
        return ()
    prefix = f"{model.LAYERS}.{parts[1]}."
    return tuple(HfTensor(prefix + theirs.format(e), (name,), "expert", e) for e in range(model.experts))
