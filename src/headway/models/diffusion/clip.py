"""CLIP's text encoder: learned positions, causal attention, LayerNorm."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.decoder import Embedding
from headway.models.layers import LayerNorm, Linear


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": _quick_gelu, "gelu": nn.functional.gelu}


class Block(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim, hidden, eps = config["hidden_size"], config["intermediate_size"], config.get("layer_norm_eps", 1e-5)
        name = config.get("hidden_act", "quick_gelu")
        if name not in ACTIVATIONS:
            raise ModelError(f"config.json has hidden_act {name!r}, which is unknown")
        self.activation, self.heads = ACTIVATIONS[name], config["num_attention_heads"]
        self.attention_norm = LayerNorm(dim, eps)
        self.q = Linear(dim, dim)
        self.k = Linear(dim, dim)
        self.v = Linear(dim, dim)
        self.o = Linear(dim, dim)
        self.mlp_norm = LayerNorm(dim, eps)
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x_BSE: Tensor, mask_B1SS: Tensor) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        normal = self.attention_norm(x_BSE)
        q, k, v = (y(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS)
        x_BSE = x_BSE + self.o(seen.transpose(1, 2).flatten(2))
        out_BSE: Tensor = x_BSE + self.down(self.activation(self.up(self.mlp_norm(x_BSE))))
        return out_BSE


class ClipTextEncoder(nn.Module):
    """CLIP's text model, up to the states after its last norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim = config["hidden_size"]
        self.embed = Embedding(config["vocab_size"], dim)
        self.positions = Embedding(config["max_position_embeddings"], dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = LayerNorm(dim, config.get("layer_norm_eps", 1e-5))

    def forward(self, ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """Return the states [B, S, E] of ids; where the mask is false is padding, which follows the tokens."""
        length = ids_BS.shape[1]
        places = torch.arange(length, device=ids_BS.device)
        x_BSE = self.embed(ids_BS) + self.positions(places)
        mask_B1SS = (places <= places.unsqueeze(1)) & mask_BS[:, None, None]
        for block in self.layers:
            x_BSE = block(x_BSE, mask_B1SS)
        out_BSE: Tensor = self.norm(x_BSE)
        return out_BSE


def stored_name(name: str) -> str:
    """Return the name of a parameter in a folder, without the prefix that some have."""
    outside = {
        "embed.weight": "embeddings.token_embedding.weight",
        "positions.weight": "embeddings.position_embedding.weight",
        "norm.weight": "final_layer_norm.weight",
        "norm.bias": "final_layer_norm.bias",
    }
    if name in outside:
        return outside[name]
    _, layer, part, kind = name.split(".")
    inside = {
        "attention_norm": "layer_norm1",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }
    return f"encoder.layers.{layer}.{inside[part]}.{kind}"
