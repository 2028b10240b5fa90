"""Mixtral: Llama with a mixture-of-experts feed-forward."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture, ExpertShape
from headway.recipe.families.llama import (
    LlamaLike,
    checked,
    common_config,
    mlp_tensors,
    refuse_what_differs,
    sizes,
)
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.rope import given, rope_settings, scaling_from
from headway.recipe.section import Positive


class MixtureLike(LlamaLike):
    """Base of MoE families with softmax routers."""

    UNCUT: ClassVar[str] = "experts do not support a tensor axis yet"

    EXPERTS: ClassVar[dict[str, str]] = {}
    """Stacks of experts' matrices: Headway's name to Hugging Face's pattern, which has a tensor per expert."""

    mlp_bias: Literal[False] = False
    """Feed-forwards have no biases."""
    experts: Positive = 8
    """Experts per layer."""
    top_k: Positive = 2
    """Experts per token."""
    balance: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the auxiliary load-balancing loss; its gradient is added, the recorded loss excludes it."""
    window: Positive | None = None
    """Sliding window in tokens, including the current one; by default none."""

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
        """Whether a layer has experts."""
        return 0 <= layer < self.layers

    @property
    def mixtures(self) -> int:
        """Number of layers with experts."""
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

    def _mlp_tensors(self, layer: int) -> Shapes:
        return expert_tensors(self) if self.has_experts(layer) else mlp_tensors(self)

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Every expert's matrices are separate tensors."""
        for name in self.tensors():
            yield from split_experts(self, name, self.EXPERTS) or (HfTensor(self.hf_name(name), (name,)),)

    @classmethod
    def _described(cls, config: Config, theta: float, kv_heads: int, eps: float) -> dict[str, Any]:
        """Return the settings that MoE configs share, with a family's defaults."""
        rope = rope_settings(config, theta)
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(
                f"config.json rotates {rope['partial_rotary_factor']} of each head; this family rotates all"
            )
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
        """Return the keys that MoE configs share."""
        return common_config(self, kind, seq) | {
            "num_experts_per_tok": self.top_k,
            "router_aux_loss_coef": self.balance,
        }


class Mixtral(MixtureLike):
    """Llama with experts in every layer."""

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {"mlp.router": "block_sparse_moe.gate"}
    EXPERTS: ClassVar[dict[str, str]] = {
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }

    family: Literal["mixtral"] = "mixtral"
    qk_norm: Literal[False] = False
    """Queries and keys are not normalized."""
    qkv_bias: Literal[False] = False
    """Queries, keys and values have no biases."""
    output_bias: Literal[False] = False
    """The attention's output has no bias."""

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of mixtral."""
        refuse_what_differs(config)
        if config.get("router_jitter_noise"):
            raise ModelError("config.json has router_jitter_noise, which is not supported", hint="set it to 0")
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
        """Write a config.json of mixtral."""
        return self._common("mixtral", seq) | {
            "num_local_experts": self.experts,
            "router_jitter_noise": 0.0,
            "sliding_window": self.window,
        }


# -- shared with other families


def expert_tensors(model: MixtureLike, bias: bool = False) -> Shapes:
    """Return the shapes of a router and of stacked experts."""
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


def split_experts(model: MixtureLike, name: str, experts: dict[str, str]) -> tuple[HfTensor, ...]:
    """Return the tensors of a folder that hold a stack, one per expert; none if it is not a stack."""
    parts = name.split(".", 2)
    pattern = experts.get(parts[-1]) if parts[0] == "layers" else None
    if pattern is None:
        return ()
    prefix = f"{model.LAYERS}.{parts[1]}."
    return tuple(HfTensor(prefix + pattern.format(e), (name,), "expert", e) for e in range(model.experts))
