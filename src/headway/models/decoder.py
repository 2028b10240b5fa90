"""The Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A plain module that runs on one device and knows nothing of parallelism. Tensor names end in their shape:

    B  sequences      L  tokens of a sequence     T  tokens of all sequences (B * L)
    D  width          N  query heads              K  key and value heads      H  size of a head
    V  vocabulary     S  tokens a cache has room for                          R  half of H
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.recipe import Model

__all__ = [
    "IGNORED",
    "Decoder",
    "KeyValues",
    "autocast",
    "chunk_rows",
    "empty_cache",
    "empty_decoder",
    "init_weights",
    "initial_weight",
]

IGNORED = -100
"""A label that is left out of the loss."""

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Logits the loss holds at once, by kind of device."""


class Linear(nn.Linear):
    """`nn.Linear` that draws no weights at construction: they are drawn by name or loaded, and once is enough."""

    def reset_parameters(self) -> None:
        """Leave memory as it is."""


class RMSNorm(nn.Module):
    """Root-mean-square normalization; its statistics are float32 whatever comes in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim."""
        # rms_norm sums bfloat16 in float32 by itself; given two dtypes it would leave its fused kernel.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_table(first: int, length: int, model: Model, device: torch.device) -> Tensor:
    """Cosines and sines of the positions from `first` on: the bits of float32, in an int32 tensor [2, L, R].

    Bits, because `fully_shard` with mixed precision rounds every floating-point argument of a block to
    bfloat16 and leaves integers alone.
    """
    exponents = torch.arange(0, model.head_dim, 2, device=device, dtype=torch.float32) / model.head_dim
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    angles_LR = torch.outer(positions, 1.0 / model.rope_theta**exponents)
    return torch.stack((angles_LR.cos(), angles_LR.sin())).view(torch.int32)


class Rotary(nn.Module):
    """The table of a sequence's positions; a module, so that who shares sequences out can say which are here."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, like_BL: Tensor, first: int = 0) -> Tensor:
        """That of `like`'s L positions, from `first` on."""
        return rotary_table(first, like_BL.shape[1], self.model, like_BL.device)


def rotate(x_BLNH: Tensor, rotary_2LR: Tensor) -> Tensor:
    """Turn each pair (i, i + R) of a head by its position's angle, in float32."""
    cos_L1R, sin_L1R = rotary_2LR.view(torch.float32).unsqueeze(2).unbind(0)
    low_BLNR, high_BLNR = x_BLNH.float().chunk(2, dim=-1)
    turned = (low_BLNR * cos_L1R - high_BLNR * sin_L1R, high_BLNR * cos_L1R + low_BLNR * sin_L1R)
    return torch.cat(turned, dim=-1).to(x_BLNH.dtype)


@dataclass
class KeyValues:
    """One layer's keys and values of the tokens read so far, with room for more."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def extend(self, k_BLKH: Tensor, v_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of the next tokens; returns all there are now."""
        end = self.length + k_BLKH.shape[1]
        assert end <= self.keys.shape[1], "the cache is full"
        self.keys[:, self.length : end] = k_BLKH
        self.values[:, self.length : end] = v_BLKH
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads may share a key and value head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim, self.grouped = model.head_dim, model.kv_heads < model.heads
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q = Linear(model.dim, width, bias=model.qkv_bias)
        self.k = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.v = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.o = Linear(width, model.dim, bias=model.output_bias)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None

    def forward(self, x_BLD: Tensor, rotary_2LR: Tensor, cache: KeyValues | None = None) -> Tensor:
        """Mix each token with those before it."""
        q_BLNH = self.q(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.k(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.v(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BLNH, k_BLKH = rotate(q_BLNH, rotary_2LR), rotate(k_BLKH, rotary_2LR)
        if cache is not None:
            k_BLKH, v_BLKH = cache.extend(k_BLKH, v_BLKH)
        y_BNLH = nn.functional.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLKH.transpose(1, 2),
            v_BLKH.transpose(1, 2),
            is_causal=q_BLNH.shape[1] > 1,  # a single query sees all there is
            enable_gqa=self.grouped,
        )
        return self.o(y_BNLH.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = Linear(model.dim, model.hidden, bias=model.mlp_bias)
        self.up = Linear(model.dim, model.hidden, bias=model.mlp_bias)
        self.down = Linear(model.hidden, model.dim, bias=model.mlp_bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.down(nn.functional.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model)

    def forward(self, x_BLD: Tensor, rotary_2LR: Tensor, cache: KeyValues | None = None) -> Tensor:
        """Pass the residual stream on, with what this layer adds."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary_2LR, cache)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class Decoder(nn.Module):
    """A decoder of the Llama family, configured by a recipe's model section with vocab_size set.

    Its weights are mere memory until `init_weights` or a load fills them.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.vocab_size is not None, "the vocabulary's size is settled before a decoder is built"
        self.model = model
        self.embed = nn.Embedding(model.vocab_size, model.dim, _weight=torch.empty(model.vocab_size, model.dim))
        self.rotary = Rotary(model)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = RMSNorm(model.dim, model.norm_eps)
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocab_size, bias=False)
        self.loss = Loss()

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor | None = None) -> Tensor:
        """Logits [B, L, V]; or, given what follows each token, the summed cross-entropy, a float32 scalar.

        Labels of -100 are left out. The sum and not the mean, so that the caller divides by the count over
        all microbatches and ranks.
        """
        x_BLD = self.hidden(tokens_BL)
        if labels_BL is None:
            return self.logits(x_BLD)
        loss: Tensor = self.loss(x_BLD, self.output_weight, labels_BL)
        return loss

    def hidden(self, tokens_BL: Tensor, cache: list[KeyValues] | None = None) -> Tensor:
        """The normalized residual stream after the last block; `cache` holds what came before."""
        first = cache[0].length if cache else 0
        assert first == 0 or tokens_BL.shape[1] == 1, "after its first tokens, a cache takes one at a time"
        rotary_2LR = self.rotary(tokens_BL, first)
        x_BLD = self.embed(tokens_BL)
        for i, block in enumerate(self.layers):
            x_BLD = block(x_BLD, rotary_2LR, cache[i]) if cache else block(x_BLD, rotary_2LR)
        return self.norm(x_BLD)

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Scores of every token of the vocabulary."""
        return nn.functional.linear(x_BLD, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The matrix [V, D] of the head: its own, or the embedding's."""
        return self.embed.weight if self.head is None else self.head.weight


class Loss(nn.Module):
    """The summed cross-entropy of what a head makes of the stream; a module, so that who shares the vocabulary out can
    put another in its place."""

    def forward(self, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
        """A float32 scalar."""
        return summed_cross_entropy(x_BLD.flatten(0, 1), weight_VD, labels_BL.flatten())


def summed_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Sum over unmasked labels of the cross-entropy of x @ weight.T, without all logits alive at once."""
    x_TD, weight_VD = autocast(x_TD), autocast(weight_VD)
    wanted = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return _SummedCrossEntropy.apply(x_TD, weight_VD, labels_T, wanted)


def autocast(x: Tensor) -> Tensor:
    """In the precision of an enclosing autocast: inside a Function no cast would be recorded for the backward pass."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def chunk_rows(kind: str, vocabulary: int) -> int:
    """Tokens whose logits a loss holds at once, on a kind of device."""
    return max(1, CHUNK_ELEMENTS.get(kind, 2**28) // vocabulary)


class _SummedCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the same pass as the loss, one chunk of tokens at a time.

    The loss is a plain sum, so that its gradients are known up to the factor that backward brings. Against
    recomputing each chunk's logits in backward this saves one of four products with the largest matrix.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, wanted: bool) -> Tensor:
        rows = chunk_rows(x_TD.device.type, weight_VD.shape[0])
        total = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if wanted else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wanted else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            kept = labels_T[here] != IGNORED
            targets = labels_T[here].where(kept, 0).unsqueeze(1)
            scores = torch.log_softmax(x_TD[here] @ weight_VD.T, dim=-1, dtype=torch.float32)
            chosen = scores.gather(1, targets)
            total -= chosen.squeeze(1).where(kept, 0.0).sum()
            if dx_TD is not None and dweight_VD is not None:
                # Straight into the dtype of the products, and masked on their narrow side: fewer passes over the
                # logits, 63 ms instead of 73 on an H200 (16k tokens, width 2048, a vocabulary of 128k).
                slope = scores if scores.dtype == x_TD.dtype else torch.empty_like(scores, dtype=x_TD.dtype)
                torch.exp(scores, out=slope).scatter_(1, targets, chosen.exp().sub_(1).to(slope.dtype))
                torch.mm(slope, weight_VD, out=dx_TD[here]).mul_(kept.unsqueeze(1))
                dweight_VD += slope.T @ (x_TD[here] * kept.unsqueeze(1))
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_TD, dweight_VD = ctx.saved_tensors
        # In float32: the factor is 1 / tokens, and rounding it to bfloat16 would scale every gradient.
        return (dx_TD.float() * factor).to(dx_TD.dtype), (dweight_VD * factor).to(ctx.dtype), None, None


def empty_decoder(model: Model, device: torch.device | str = "cpu") -> Decoder:
    """A decoder on a device, for those about to load or draw its weights."""
    with torch.device(device):
        return Decoder(model)


def empty_cache(decoder: Decoder, capacity: int, batch: int = 1) -> list[KeyValues]:
    """Room for the keys and values of `capacity` tokens, in the precision the decoder computes in."""
    model, like = decoder.model, decoder.embed.weight
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    shape = (batch, capacity, model.kv_heads, model.head_dim)
    pairs = torch.empty((model.layers, 2, *shape), dtype=dtype, device=like.device)
    return [KeyValues(keys, values) for keys, values in pairs]


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Draw every weight afresh; see `initial_weight`."""
    for name, parameter in decoder.named_parameters():
        parameter.copy_(initial_weight(decoder.model, name, tuple(parameter.shape), seed))


def initial_weight(model: Model, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The fresh value of one parameter: float32, on the CPU, a function of the arguments alone.

    Each has a generator of its own, so that neither the order nor the other parameters matter. What is added
    to the residual stream is drawn smaller by sqrt(2 * layers), so that the stream does not grow with depth.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    adds_to_stream = name.endswith((".o.weight", ".down.weight"))
    std = model.init_std / math.sqrt(2 * model.layers) if adds_to_stream else model.init_std
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
