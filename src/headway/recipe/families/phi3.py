"""Phi-3 and Phi-4-mini: Llama of which a part of each head is rotated, stretched by LongRoPE, with or without a window.

A folder of theirs has queries, keys and values in one matrix, and so the gate and what it gates; ours are apart.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.llama import LlamaLike, checked, common_config, refuse_experts, refuse_what_differs, sizes
from headway.recipe.model import Config, HfTensor, Model
from headway.recipe.rope import given, rope_settings, scaling_from
from headway.recipe.section import NotNegative

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attention_dropout")
SWITCHES = ("qk_norm", "qkv_bias", "output_bias", "mlp_bias")


class Phi3(LlamaLike):
    """Llama with partial rotary positions and an optional sliding window."""

    family: Literal["phi3"] = "phi3"
    window: NotNegative = 0
    """Sliding window in tokens, including the current one; 0: none."""
    rotary_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of each head that is rotated: its first dimensions."""

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_dim * self.rotary_share)

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of phi3."""
        refuse_what_differs(config)
        refuse_experts(config)
        for key in DROPOUTS:
            if config.get(key):
                raise ModelError(f"config.json has {key} {config[key]}; Headway drops nothing", hint=f"set {key} to 0")
        rope = _rope(config)
        settings = sizes(config) | {
            "kv_heads": config.get("num_key_value_heads"),
            "head_dim": config.get("head_dim"),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling_from(rope, {"max_position_embeddings": _longest(config)}),
            "rotary_share": rope["partial_rotary_factor"],
            "window": given(config, "sliding_window", 0),
            "norm_eps": given(config, "rms_norm_eps", 1e-5),
            "tie_embeddings": given(config, "tie_word_embeddings", False),
            "init_std": given(config, "initializer_range", 0.02),
        }
        return checked(cls, settings)

    def to_config(self, seq: int) -> dict[str, Any]:
        """Write a config.json of phi3, which has no biases, and LongRoPE or no scaling."""
        for name in SWITCHES:
            if getattr(self, name):
                raise ModelError(f"phi3 has no {name}", hint=f"model.{name} = false")
        scaling = self.rope_scaling
        if scaling is not None and (scaling.kind != "longrope" or self.heads * self.head_dim != self.dim):
            raise ModelError(
                f"phi3 of `transformers` has no positions scaled by {scaling.kind} in heads of {self.head_dim}",
                hint="it has longrope, in heads of dim / heads",
            )
        config = common_config(self, "phi3", seq)
        for key in {"rope_parameters", "rope_scaling"} & config.keys():
            config[key]["partial_rotary_factor"] = self.rotary_share
        original = scaling.original if scaling is not None else config["max_position_embeddings"]
        return config | {
            "original_max_position_embeddings": original,
            "partial_rotary_factor": self.rotary_share,
            "sliding_window": self.window or None,
            "pad_token_id": None,
            **dict.fromkeys(DROPOUTS, 0.0),
        }

    def architecture(self) -> Architecture:
        """All layers have the window, if there is one."""
        windowed = self.layers if self.window else 0
        return replace(super().architecture(), window=self.window or None, windowed_layers=windowed)

    def window_of(self, layer: int) -> int | None:
        """The same in all layers."""
        return self.window or None

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Queries, keys and values are fused, as are gate and up."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fused = (
            _rows("self_attn.qkv_proj", ("attention.q", "attention.k", "attention.v"), (queries, keys, keys)),
            _rows("mlp.gate_up_proj", ("mlp.gate", "mlp.up"), (self.hidden, self.hidden)),
        )
        first = {form.headway_names[0]: form for form in fused}
        others = {name for form in fused for name in form.headway_names[1:]}
        for name in self.tensors():
            layers, _, inside = name.partition(".")
            layer, _, rest = inside.partition(".")
            if layers == "layers" and rest in first:
                names = tuple(f"layers.{layer}.{part}" for part in first[rest].headway_names)
                yield replace(first[rest], name=f"{self.LAYERS}.{layer}.{first[rest].name}", headway_names=names)
            elif rest not in others:
                yield HfTensor(self.hf_name(name), (name,))


def _rows(hf_name: str, names: tuple[str, ...], rows: tuple[int, ...]) -> HfTensor:
    return HfTensor(f"{hf_name}.weight", tuple(f"{name}.weight" for name in names), "rows", rows=rows)


def _rope(config: Config) -> dict[str, Any]:
    """Return rotary settings; the top-level original length takes precedence, and su and yarn mean LongRoPE."""
    rope = rope_settings(config)
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    if rope["rope_type"] not in ("default", "longrope"):
        raise ModelError(f"config.json has rotary scaling {rope['rope_type']!r}; phi3 supports only longrope")
    return rope | {"original_max_position_embeddings": given(config, "original_max_position_embeddings", 4096)}


def _longest(config: Config) -> int:
    return int(given(config, "max_position_embeddings", 4096))
