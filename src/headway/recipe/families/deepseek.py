"""DeepSeek-V3: multi-head latent attention, and sigmoid-routed experts balanced by biases."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture, ExpertShape, LatentAttention
from headway.recipe.families.llama import (
    LlamaLike,
    checked,
    common_config,
    costs,
    mlp_tensors,
    refuse_what_differs,
    sizes,
)
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.rope import RotaryModel, given, rope_settings, scaling_from
from headway.recipe.section import DERIVED, NotNegative, Positive

KIND = "deepseek_v3"
DEFAULTS = {
    "expert_hidden": ("moe_intermediate_size", 2048),
    "experts": ("n_routed_experts", 256),
    "top_k": ("num_experts_per_tok", 8),
    "shared_experts": ("n_shared_experts", 1),
    "first_dense": ("first_k_dense_replace", 3),
    "groups": ("n_group", 8),
    "top_groups": ("topk_group", 4),
    "normalize_weights": ("norm_topk_prob", True),
    "routed_scale": ("routed_scaling_factor", 2.5),
    "kv_rank": ("kv_lora_rank", 512),
    "rope_dim": ("qk_rope_head_dim", 64),
    "value_dim": ("v_head_dim", 128),
    "rope_pairs": ("rope_interleave", True),
    "attention_bias": ("attention_bias", False),
}
"""Fields, with their keys in a config.json and the defaults of those."""
NEEDED = ("kv_lora_rank", "n_routed_experts", "moe_intermediate_size")
"""Required keys."""
ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of DeepSeek's code with a single value in V3; V2 has others."""
EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class DeepSeekV3(RotaryModel):
    """A decoder with latent attention, routed and shared experts."""

    UNCUT: ClassVar[str] = "latent attention and experts do not support a tensor axis yet"

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {
        "attention.q_down": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
        "mlp.router": "mlp.gate",
        "mlp.balance.bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
    }

    family: Literal["deepseek_v3"] = "deepseek_v3"
    q_rank: NotNegative = 0
    """Low rank of queries; 0: a direct projection."""
    kv_rank: Positive = DERIVED
    """Rank of the latent vector of keys and values, which is cached per token; by default 4 dim / heads."""
    head_dim: Positive = DERIVED
    """Size of a query and key head, `rope_dim` included; by default 1.5 dim / heads."""
    rope_dim: Positive = DERIVED
    """Rotary part of it, whose keys all heads share; by default half of dim / heads, and even."""
    value_dim: Positive = DERIVED
    """Size of a value head; by default dim / heads."""
    rope_pairs: bool = True
    """Rotate neighbouring dimensions (interleaved); otherwise those half of `rope_dim` apart."""
    attention_bias: bool = False
    """Biases on the down projections and on the attention's output."""
    experts: Positive = 8
    """Number of routed experts per layer."""
    top_k: Positive = 2
    """Experts per token."""
    expert_hidden: Positive = DERIVED
    """Inner width of an expert; by default hidden / (top_k + shared_experts)."""
    shared_experts: Positive = 1
    """Number of shared experts, which every token uses."""
    first_dense: NotNegative = 1
    """Number of first layers with a dense feed-forward instead."""
    groups: Positive = 1
    """Groups of experts."""
    top_groups: Positive = 1
    """Groups per token."""
    normalize_weights: bool = True
    """Normalize a token's expert weights to sum to `routed_scale`."""
    routed_scale: Annotated[float, Field(gt=0)] = 2.5
    """Factor of expert weights."""
    balance_rate: Annotated[float, Field(ge=0, le=1)] = 1e-3
    """Step size of the balancing bias of each expert."""

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        head = max(dim // heads, 4)
        sizes = {"rope_dim": head // 4 * 2, "head_dim": head + head // 4 * 2, "value_dim": head, "kv_rank": 4 * head}
        return super()._follow(dim, heads) | sizes

    @model_validator(mode="before")
    @classmethod
    def _narrow_experts(cls, values: Any) -> Any:
        """Derive an expert's width from `hidden`."""
        if not isinstance(values, dict) or values.get("expert_hidden") is not None:
            return values
        dim, heads = (values.get(key) or cls.model_fields[key].default for key in ("dim", "heads"))
        used = [values.get(key) or cls.model_fields[key].default for key in ("top_k", "shared_experts")]
        if not all(isinstance(number, int) and number > 0 for number in (dim, heads, *used)):
            return values
        hidden = values.get("hidden") or cls._follow(dim, heads)["hidden"]
        return {**values, "expert_hidden": max(hidden // sum(used), 1)} if isinstance(hidden, int) else values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kv_heads != self.heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must equal heads ({self.heads}): all share one latent vector")
        if self.rope_dim >= self.head_dim or self.rope_dim % 2:
            raise ValueError(f"rope_dim ({self.rope_dim}) must be even and less than head_dim ({self.head_dim})")
        if self.experts % self.groups or self.experts < 2 * self.groups:
            raise ValueError(f"groups ({self.groups}) must divide experts ({self.experts}) into two or more each")
        if self.top_groups > self.groups or self.top_k > self.top_groups * self.experts // self.groups:
            raise ValueError(
                f"top_k ({self.top_k}) exceeds the experts in top_groups ({self.top_groups}) of {self.groups} groups"
                f" of {self.experts} experts"
            )
        if self.rope_scaling is not None and self.rope_scaling.kind != "yarn" and self.rope_scaling.mscale_all:
            raise ValueError(f"rope_scaling.mscale_all needs yarn, not {self.rope_scaling.kind}")
        return self

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.rope_dim

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of deepseek_v3."""
        refuse_what_differs(config)
        _refuse_others(config)
        rope = rope_settings(config)
        if rope["partial_rotary_factor"] != 1:
            raise ModelError(
                f"config.json rotates {rope['partial_rotary_factor']} of qk_rope_head_dim; {KIND} rotates all"
            )
        numbers = {field: given(config, key, default) for field, (key, default) in DEFAULTS.items()}
        settings = sizes(config) | numbers | {
            "kv_heads": given(config, "num_key_value_heads", config["num_attention_heads"]),
            "head_dim": given(config, "qk_nope_head_dim", 128) + numbers["rope_dim"],
            "q_rank": config.get("q_lora_rank", 1536) or 0,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, config),
            "norm_eps": given(config, "rms_norm_eps", 1e-6),
            "tie_embeddings": given(config, "tie_word_embeddings", False),
            "init_std": given(config, "initializer_range", 0.02),
        }  # fmt: skip
        return checked(cls, settings)

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of deepseek_v3, without multi-token prediction layers."""
        return common_config(self, KIND, seq) | {
            **{key: getattr(self, field) for field, (key, _) in DEFAULTS.items()},
            **ONLY,
            "q_lora_rank": self.q_rank or None,
            "qk_nope_head_dim": self.head_dim - self.rope_dim,
            "qk_head_dim": self.head_dim,
            "head_dim": self.rope_dim,
            "num_nextn_predict_layers": 0,
        }

    def architecture(self) -> Architecture:
        """Latent attention, and experts after the first layers."""
        return Architecture(
            **costs(self),
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            latent=LatentAttention(self.q_rank, self.kv_rank, self.rope_dim, self.value_dim),
            experts=ExpertShape(self.experts, self.top_k, self.expert_hidden, self.shared_experts, self.first_dense),
        )

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, latent attention, and a feed-forward or experts."""
        shapes: Shapes = {"attention_norm.weight": (self.dim,)} | self._attention_tensors()
        shapes["mlp_norm.weight"] = (self.dim,)
        if layer < self.first_dense:
            return shapes | mlp_tensors(self)
        up, hidden = (self.experts, self.expert_hidden, self.dim), self.expert_hidden * self.shared_experts
        shapes |= linear("mlp.router", self.dim, self.experts)
        shapes |= {
            "mlp.experts.gate": up,
            "mlp.experts.up": up,
            "mlp.experts.down": (self.experts, self.dim, self.expert_hidden),
        }
        shapes |= linear("mlp.shared.gate", self.dim, hidden) | linear("mlp.shared.up", self.dim, hidden)
        return shapes | linear("mlp.shared.down", hidden, self.dim)

    def _attention_tensors(self) -> Shapes:
        bias, queries = self.attention_bias, self.heads * self.head_dim
        shapes = linear("attention.q", self.dim, queries)
        if self.q_rank:
            shapes = linear("attention.q_down", self.dim, self.q_rank, bias)
            shapes |= {"attention.q_norm.weight": (self.q_rank,)} | linear("attention.q_up", self.q_rank, queries)
        keys = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        shapes |= linear("attention.kv_down", self.dim, self.kv_rank + self.rope_dim, bias)
        shapes |= {"attention.kv_norm.weight": (self.kv_rank,)} | linear("attention.kv_up", self.kv_rank, keys)
        return shapes | linear("attention.o", self.heads * self.value_dim, self.dim, bias)

    def buffers(self) -> Shapes:
        """The balancing biases of experts, which get no gradient."""
        return {f"layers.{layer}.mlp.balance.bias": (self.experts,) for layer in range(self.first_dense, self.layers)}

    def follows(self, name: str) -> bool:
        """Also ignore multi-token prediction layers, which come after the last."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return super().follows(name) or (layer is not None and int(layer[1]) >= self.layers)

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Every expert's matrices are separate tensors."""
        for name in (*self.tensors(), *self.buffers()):
            layer, _, which = name.removeprefix("layers.").partition(".mlp.experts.")
            if not which:
                yield HfTensor(self.hf_name(name), (name,))
                continue
            for i in range(self.experts):
                hf_name = f"{self.LAYERS}.{layer}.mlp.experts.{i}.{EXPERTS[which]}.weight"
                yield HfTensor(hf_name, (name,), "expert", i)


def _refuse_others(config: Config) -> None:
    """Raise ModelError for configs of other families."""
    missing = [key for key in NEEDED if config.get(key) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    for key, only in ONLY.items():
        if given(config, key, only) != only:
            raise ModelError(
                f"config.json has {key} {config[key]!r}; {KIND} supports only {only!r}",
                hint="DeepSeek-V2 routes by softmax without biases, and is not supported",
            )
