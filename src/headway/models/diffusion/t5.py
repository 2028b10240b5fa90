"""The encoder of T5 and UMT5: biases of attention by distance, RMSNorm, gated or plain feed-forward."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.decoder import Embedding
from headway.models.layers import Linear, RMSNorm, gelu

ACTIVATIONS = {"relu": nn.functional.relu, "gelu_new": gelu, "gelu": nn.functional.gelu}


class Block(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: Mapping[str, Any], biased: bool) -> None:
        super().__init__()
        dim, inner, hidden = config["d_model"], config["num_heads"] * config["d_kv"], config["d_ff"]
        self.heads = config["num_heads"]
        eps = config.get("layer_norm_epsilon", 1e-6)
        gate, _, name = str(config.get("feed_forward_proj", "relu")).rpartition("-")
        name = {"gated-gelu": "gelu_new"}.get(f"{gate}-{name}", name)
        if name not in ACTIVATIONS or gate not in ("", "gated"):
            raise ModelError(f"config.json has feed_forward_proj {config['feed_forward_proj']!r}, which is unknown")
        self.activation = ACTIVATIONS[name]
        self.attention_norm = RMSNorm(dim, eps)
        self.q = Linear(dim, inner, bias=False)
        self.k = Linear(dim, inner, bias=False)
        self.v = Linear(dim, inner, bias=False)
        self.o = Linear(inner, dim, bias=False)
        buckets = config.get("relative_attention_num_buckets", 32)
        self.distances = Embedding(buckets, self.heads) if biased else None
        self.mlp_norm = RMSNorm(dim, eps)
        self.gate = Linear(dim, hidden, bias=False)
        self.up = Linear(dim, hidden, bias=False) if gate else None
        self.down = Linear(hidden, dim, bias=False)

    def forward(self, x_BSE: Tensor, bias_BNSS: Tensor) -> Tensor:
        """Return the residual stream with this layer's contribution; scores are not scaled."""
        normal = self.attention_norm(x_BSE)
        q, k, v = (y(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_BNSS, scale=1.0)
        x_BSE = x_BSE + self.o(seen.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(x_BSE)
        hidden = self.activation(self.gate(normal))
        return x_BSE + self.down(hidden if self.up is None else hidden * self.up(normal))


class T5Encoder(nn.Module):
    """T5's or UMT5's encoder; in UMT5, every layer has biases of its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.buckets = config.get("relative_attention_num_buckets", 32)
        self.longest = config.get("relative_attention_max_distance", 128)
        own = config["model_type"] == "umt5"
        self.embed = Embedding(config["vocab_size"], config["d_model"])
        self.layers = nn.ModuleList(Block(config, own or layer == 0) for layer in range(config["num_layers"]))
        self.norm = RMSNorm(config["d_model"], config.get("layer_norm_epsilon", 1e-6))

    def forward(self, ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """Return the states [B, S, E] of ids; where the mask is false is padding."""
        x_BSE = self.embed(ids_BS)
        places = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        buckets_SS = buckets_of(places - places.unsqueeze(1), self.buckets, self.longest)
        hidden = torch.zeros(mask_BS.shape, dtype=x_BSE.dtype, device=x_BSE.device)
        hidden = hidden.masked_fill(~mask_BS, torch.finfo(x_BSE.dtype).min)[:, None, None]
        bias_BNSS = hidden
        for block in self.layers:
            if block.distances is not None:
                bias_BNSS = block.distances(buckets_SS).permute(2, 0, 1) + hidden
            x_BSE = block(x_BSE, bias_BNSS)
        out_BSE: Tensor = self.norm(x_BSE)
        return out_BSE


def buckets_of(distances: Tensor, count: int, longest: int) -> Tensor:
    """Return the bucket of each distance: half for tokens after, of each half one per distance, then logarithmic."""
    half = count // 2
    exact = half // 2
    size = distances.abs()
    far = torch.log(size.float() / exact) / math.log(longest / exact) * (half - exact)
    far = (exact + far.clamp(min=0).to(torch.long)).clamp(max=half - 1)
    return (distances > 0) * half + torch.where(size < exact, size, far)


def stored_name(name: str) -> str:
    """Return the name of a parameter in a folder."""
    outside = {"embed.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, part, kind = name.split(".")
    inside = {
        "attention_norm": "0.layer_norm",
        "distances": "0.SelfAttention.relative_attention_bias",
        **{key: f"0.SelfAttention.{key}" for key in "qkvo"},
        "mlp_norm": "1.layer_norm",
        "gate": "1.DenseReluDense.wi_0",
        "up": "1.DenseReluDense.wi_1",
        "down": "1.DenseReluDense.wo",
    }
    return f"encoder.block.{layer}.layer.{inside[part]}.{kind}"


def plain_name(name: str) -> str:
    """Return the name of an ungated feed-forward's first matrix."""
    return name.replace("wi_0", "wi")
