"""Models as a user might write them, importable by workers: nothing here knows of Headway."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens, and learned positions if there are any."""

    def __init__(self, vocabulary: int, width: int, positions: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.pos = nn.Embedding(positions, width) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.pos is None:
            return self.tok(tokens)
        return self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))


class Attention(nn.Module):
    """Rotary positions from a complex table that all blocks share, and a temperature that is saved with the model."""

    def __init__(self, width: int, heads: int, turns: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("temperature", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.turn(q) * self.temperature, self.turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns[: x.shape[2]]).flatten(-2).to(x.dtype)


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int, turns: Tensor) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads, turns), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tiny(nn.Module):
    """A GPT of a few thousand parameters."""

    def __init__(
        self, vocabulary: int, width: int = 32, depth: int = 3, heads: int = 4, tied: bool = True, positions: int = 32
    ) -> None:
        super().__init__()
        size = width // heads
        angles = torch.outer(torch.arange(32), 100.0 ** (-torch.arange(0, size, 2) / size))
        turns = torch.polar(torch.ones_like(angles), angles)
        self.embed = Embed(vocabulary, width, positions)
        self.blocks = nn.ModuleList(Block(width, heads, turns) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.tok.weight, std=0.02)
        if tied:
            self.head.weight = self.embed.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedAcrossBlocks(Tiny):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.blocks[1].mlp.up.weight = self.blocks[0].mlp.up.weight


class TiedToABlock(Tiny):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.norm.weight = self.blocks[0].norm1.weight


class OneBlockTwice(Tiny):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.blocks[1] = self.blocks[0]


class Bare(nn.Module):
    """No more than a table of logits; the others are wrong in one thing each."""

    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class ReturnsTuple(Bare):
    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.table(tokens), None


class ReturnsLast(Bare):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)[:, -1]


class ReturnsChoices(Bare):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).argmax(-1)


class ShortContext(Bare):
    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > 16:
            raise ValueError(f"{tokens.shape[1]} tokens are too many")
        return self.table(tokens)


class HiddenTensor(Bare):
    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__(vocabulary)
        self.mask = torch.ones(3)


class LooksAtValues(Bare):
    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__(vocabulary)
        self.rates = [float(rate) for rate in torch.linspace(0, 1, 4)]


class Refuses(Bare):
    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__(vocabulary)
        raise RuntimeError("not today\nnor tomorrow")


class Kills(Bare):
    def __init__(self, vocabulary: int = 320) -> None:
        super().__init__(vocabulary)
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(Bare):
    """Takes its time as long as a file is there, and writes into it that it does."""

    def __init__(self, vocabulary: int = 320, flag: str = "") -> None:
        super().__init__(vocabulary)
        if Path(flag).exists():
            Path(flag).write_text("seen")
        deadline = time.monotonic() + 60
        while Path(flag).exists() and time.monotonic() < deadline:
            time.sleep(0.05)


class Dropped(Tiny):
    """With dropout, whose masks are random state that a run must not lose."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Half(Dropped):
    """Dropout, whose masks must come back, and a block that is not trained."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.blocks[0].requires_grad_(False)


class WithACounter(Tiny):
    """A buffer of the model itself, which no stage of a pipeline owns."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class PositionsOutside(nn.Module):
    """Adds positions in `forward`, as many do: in a pipeline every stage would."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(MLP(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
