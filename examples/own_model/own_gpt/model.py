"""A small GPT in plain PyTorch: LayerNorm, RoPE, GELU; tokens in, logits out."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention with RoPE."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        angles = torch.outer(torch.arange(context), 10_000 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each token to those before it."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of numbers by the angles of their position."""
        cos, sin = (table[: x.shape[2]].to(x.dtype) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward, each added to the residual stream."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the updated residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, vocabulary: int, width: int = 64, depth: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, L, V] of tokens [B, L]."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
