"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a sliding window in every other layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import LlamaLike, attention_tensors, checked, refuse_what_differs
from headway.recipe.families.mixtral import MixtureLike, expert_tensors
from headway.recipe.model import Config, HfTensor, Model, Shapes
from headway.recipe.rope import given
from headway.recipe.section import Positive

AboveZero = Annotated[float, Field(gt=0)]
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Default rotary settings of a config.json."""
DEQUANTIZED = "have `transformers` load it with Mxfp4Config(dequantize=True), save_pretrained, and use that folder"


class GptOss(MixtureLike):
    """A MoE decoder with attention sinks."""

    NAMES: ClassVar[dict[str, str]] = LlamaLike.NAMES | {
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
    }

    family: Literal["gpt_oss"] = "gpt_oss"
    qk_norm: Literal[False] = False
    """Queries and keys are not normalized."""
    qkv_bias: bool = True
    """Biases on the query, key and value projections; requires output_bias, and vice versa."""
    output_bias: bool = True
    """Bias on the attention's output projection."""
    window: Positive | None = 128
    """Sliding window of every other layer, from the first, in tokens including the current one."""
    swiglu_alpha: AboveZero = 1.702
    """Slope of an expert's gate."""
    swiglu_limit: AboveZero = 7.0
    """Clamp of an expert's gate (from above) and linear part (from both sides)."""

    def window_of(self, layer: int) -> int | None:
        """A window in every other layer, from the first."""
        return None if layer % 2 else self.window

    def architecture(self) -> Architecture:
        """Sinks, and biases everywhere."""
        arch = super().architecture()
        assert arch.experts is not None
        return replace(arch, sinks=True, experts=replace(arch.experts, bias=True, router_bias=True))

    def block_tensors(self, layer: int) -> Shapes:
        """Two norms, attention with sinks, experts."""
        return {
            "attention_norm.weight": (self.dim,),
            "attention.sinks": (self.heads,),
            **attention_tensors(self, self.qkv_bias, self.output_bias),
            "mlp_norm.weight": (self.dim,),
            **expert_tensors(self, bias=True),
        }

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Experts are stacked and transposed; columns of gate and up alternate."""
        for name in self.tensors():
            prefix, _, part = name.partition(".mlp.experts.")
            hf_prefix = f"{prefix.replace('layers', self.LAYERS)}.mlp.experts"
            match part:
                case "":
                    yield HfTensor(self.hf_name(name), (name,))
                case "gate":
                    yield HfTensor(f"{hf_prefix}.gate_up_proj", (name, f"{prefix}.mlp.experts.up"), "experts-paired")
                case "gate_bias":
                    both = (name, f"{prefix}.mlp.experts.up_bias")
                    yield HfTensor(f"{hf_prefix}.gate_up_proj_bias", both, "experts-paired")
                case "down":
                    yield HfTensor(f"{hf_prefix}.down_proj", (name,), "experts-transposed")
                case "down_bias":
                    yield HfTensor(f"{hf_prefix}.down_proj_bias", (name,))

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of gpt_oss; quantized weights are refused."""
        if config.get("quantization_config"):
            raise ModelError("config.json has quantized weights (mxfp4)", hint=DEQUANTIZED)
        refuse_what_differs(config)
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config = {**config, "rope_parameters": YARN | {"rope_theta": given(config, "rope_theta", 150_000.0)}}
        bias = bool(config.get("attention_bias", True))
        return checked(
            cls,
            cls._described(config, theta=150_000.0, kv_heads=8, eps=1e-5)
            | {
                "head_dim": given(config, "head_dim", 64),
                "qkv_bias": bias,
                "output_bias": bias,
                "experts": given(config, "num_local_experts", given(config, "num_experts", 128)),
                "top_k": given(config, "num_experts_per_tok", given(config, "experts_per_token", 4)),
                "window": _window(config),
                "swiglu_alpha": given(config, "swiglu_alpha", 1.702),
                "swiglu_limit": given(config, "swiglu_limit", 7.0),
            },
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of gpt_oss, which has one switch for all attention biases."""
        if self.qkv_bias != self.output_bias:
            raise ModelError("gpt_oss needs qkv_bias = output_bias", hint="set both or neither")
        kinds = ["full_attention" if self.window_of(i) is None else "sliding_attention" for i in range(self.layers)]
        return self._common("gpt_oss", seq) | {
            "attention_bias": self.qkv_bias,
            "num_local_experts": self.experts,
            "layer_types": kinds,
            "sliding_window": self.window or 128,  # required even if no layer has one
            "swiglu_alpha": self.swiglu_alpha,
            "swiglu_limit": self.swiglu_limit,
        }


def _window(config: Config) -> int | None:
    """Return the window of every other layer, or None."""
    layers = given(config, "num_hidden_layers", 36)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    kinds = given(config, "layer_types", alternating)
    if set(kinds) == {"full_attention"}:
        return None
    if list(kinds) != alternating:
        raise ModelError(
            "config.json has irregular layer_types",
            hint="sliding_attention and full_attention must alternate, or all be full_attention",
        )
    window = config.get("sliding_window", 128)
    if window is None:
        raise ModelError("config.json has sliding_attention layers but no sliding_window")
    return int(window)
