"""DeepSeek-V3: multi-head latent attention, and sigmoid-routed experts.

Besides the letters of `models/layers.py`: C the latent vector of a token's keys and values, P the part of a head
without positions, Q the rotary part, U the size of a value head, G groups of experts.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from headway.kernels.dispatch import LEAST_HEAD
from headway.models.attention import BlockContext, attend
from headway.models.decoder import Decoder
from headway.models.experts import BiasBalance, Experts
from headway.models.kv_cache import LayerCache
from headway.models.layers import GatedFeedForward, Linear, RMSNorm
from headway.models.rotary import rotate, rotate_pairs, yarn_mscale
from headway.recipe.families.deepseek import DeepSeekV3

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, independent of norm_eps."""


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projected from one latent vector and one rotary key per token.

    The cache stores these two. With a cache, queries are projected into the latent space, so that cached vectors need
    not be expanded.
    """

    def __init__(self, model: DeepSeekV3) -> None:
        super().__init__()
        self.heads, self.head_dim, self.value_dim = model.heads, model.head_dim, model.value_dim
        self.kv_rank, self.rope_dim = model.kv_rank, model.rope_dim
        self.plain_dim = model.head_dim - model.rope_dim
        self.turn = rotate_pairs if model.rope_pairs else rotate
        self.scale = _scale(model)
        width, bias = model.heads * model.head_dim, model.attention_bias
        if model.q_rank:
            self.q_down = Linear(model.dim, model.q_rank, bias=bias)
            self.q_norm = RMSNorm(model.q_rank, LATENT_EPS)
            self.q_up = Linear(model.q_rank, width, bias=False)
        else:
            self.q = Linear(model.dim, width, bias=False)
        self.kv_down = Linear(model.dim, model.kv_rank + model.rope_dim, bias=bias)
        self.kv_norm = RMSNorm(model.kv_rank, LATENT_EPS)
        self.kv_up = Linear(model.kv_rank, model.heads * (self.plain_dim + model.value_dim), bias=False)
        self.o = Linear(model.heads * model.value_dim, model.dim, bias=bias)
        self.narrow = bool(model.q_rank)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        (table,) = context.tables
        q_BLNH = self.q_up(self.q_norm(self.q_down(x_BLD))) if self.narrow else self.q(x_BLD)
        q_BLNP, q_BLNQ = q_BLNH.unflatten(-1, (-1, self.head_dim)).split((self.plain_dim, self.rope_dim), dim=-1)
        c_BLC, k_BLQ = self.kv_down(x_BLD).split((self.kv_rank, self.rope_dim), dim=-1)
        c_BLC = self.kv_norm(c_BLC)
        q_BLNQ, k_BL1Q = self.turn(q_BLNQ, table), self.turn(k_BLQ.unsqueeze(2), table)
        if context.cache is not None:
            return self.o(self._latently(q_BLNP, q_BLNQ, c_BLC, k_BL1Q, context.cache).flatten(2))
        kv_BLNH = self.kv_up(c_BLC).unflatten(-1, (self.heads, -1))
        k_BLNP, v_BLNU = kv_BLNH.split((self.plain_dim, self.value_dim), dim=-1)
        k_BLNH = torch.cat((k_BLNP, k_BL1Q.expand(-1, -1, self.heads, -1)), dim=-1)
        mask = context.masks.get(None)
        if mask is None or isinstance(mask, Tensor) or self.value_dim < LEAST_HEAD:
            v_BLNU = _as_wide(v_BLNU, self.head_dim)
        y_BLNU = attend(torch.cat((q_BLNP, q_BLNQ), dim=-1), k_BLNH, v_BLNU, context, scale=self.scale)
        return self.o(y_BLNU[..., : self.value_dim].flatten(2))

    def _latently(self, q_BLNP: Tensor, q_BLNQ: Tensor, c_BLC: Tensor, k_BL1Q: Tensor, cache: LayerCache) -> Tensor:
        """The same with a cache: its vectors are one head of keys, and the values are their latent part."""
        weight_NHC = self.kv_up.weight.unflatten(0, (self.heads, -1))
        keys_NPC, values_NUC = weight_NHC.split((self.plain_dim, self.value_dim), dim=1)
        q_BLNC = torch.einsum("blnp,npc->blnc", q_BLNP, keys_NPC)
        q_BLNK, kept_BL1K = torch.cat((q_BLNC, q_BLNQ), dim=-1), torch.cat((c_BLC.unsqueeze(2), k_BL1Q), dim=-1)
        y_BLNC = cache.attend(q_BLNK, kept_BL1K, None, scale=self.scale, value_dim=self.kv_rank)
        return torch.einsum("blnc,nuc->blnu", y_BLNC, values_NUC)


def _scale(model: DeepSeekV3) -> float:
    """Return the factor of scores: YaRN's second factor applies to queries and keys, so it is squared."""
    scaling = model.rope_scaling
    more = yarn_mscale(scaling.factor, scaling.mscale_all) if scaling is not None and scaling.mscale_all else 1.0
    return model.head_dim**-0.5 * more * more


def _as_wide(v_BLNU: Tensor, head_dim: int) -> Tensor:
    """Pad values with zeros to the width of keys, as SDPA's flash kernels need; its fallback on a CPU stores all scores
    for the backward pass. Flex attention takes any width."""
    return nn.functional.pad(v_BLNU, (0, max(head_dim - v_BLNU.shape[-1], 0)))


def choose_experts(logits_TE: Tensor, bias_E: Tensor, model: DeepSeekV3) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, X] and their weights, from float32 scores.

    Biases and groups affect the choice but not the weights, so that they get no gradient.
    """
    scores_TE = logits_TE.float().sigmoid()
    chosen_TX = _best(scores_TE.detach() + bias_E, model).topk(model.top_k, dim=-1).indices
    weights_TX = scores_TE.gather(1, chosen_TX)
    if model.normalize_weights:
        weights_TX = weights_TX / (weights_TX.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TX * model.routed_scale, chosen_TX


def _best(wanted_TE: Tensor, model: DeepSeekV3) -> Tensor:
    """Mask the scores of all but the best groups, ranked by the sum of their two best scores."""
    if model.groups == model.top_groups:
        return wanted_TE
    wanted_TGE = wanted_TE.unflatten(-1, (model.groups, -1))
    groups_TG = wanted_TGE.topk(2, dim=-1).values.sum(dim=-1)
    best_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter(
        1, groups_TG.topk(model.top_groups, dim=-1).indices, True
    )
    return wanted_TGE.masked_fill(~best_TG.unsqueeze(-1), float("-inf")).flatten(1)


class Mixture(nn.Module):
    """A feed-forward of routed and shared experts."""

    def __init__(self, model: DeepSeekV3) -> None:
        super().__init__()
        self.model = model
        self.router = Linear(model.dim, model.experts, bias=False)
        self.experts = Experts(model.experts, model.dim, model.expert_hidden)
        self.shared = GatedFeedForward(model.dim, model.expert_hidden * model.shared_experts)
        self.balance = BiasBalance(model.experts, model.balance_rate)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply the feed-forward to each token."""
        x_TD = x_BLD.flatten(0, 1)
        # Always in float32: bfloat16 would create ties between experts.
        with _as_it_stands(x_TD.device.type):
            logits_TE = nn.functional.linear(x_TD.float(), self.router.weight.float())
        weights_TX, chosen_TX = choose_experts(logits_TE, self.balance.bias, self.model)
        y_TD = self.balance(self.experts(x_TD, weights_TX, chosen_TX), chosen_TX)
        return y_TD.view(x_BLD.shape) + self.shared(x_BLD)


def _as_it_stands(kind: str) -> AbstractContextManager[object]:
    """Disable autocast; the meta device has none."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class Block(nn.Module):
    """A pre-norm block of attention and feed-forward or experts."""

    def __init__(self, model: DeepSeekV3, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = LatentAttention(model)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        dense = layer < model.first_dense
        self.mlp = GatedFeedForward(model.dim, model.hidden) if dense else Mixture(model)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class DeepSeekDecoder(Decoder):
    """A decoder of DeepSeek-V3's family."""

    model: DeepSeekV3

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model, layer)

    def cache_widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """One latent vector with its rotated key for all heads, and no values."""
        return (1, self.model.kv_rank + self.model.rope_dim), (1, 0)
