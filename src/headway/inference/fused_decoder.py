"""A pass of a Llama-like decoder in a few fused kernels per layer, with the parameters of its modules in place.

    tokens of the pass   products                                            kernels per layer
    1                    matrix_vector, with norms and additions inside      5, 6 with split keys
    up to 512            sequential_linear; cuBLAS where nothing is fused    8 or 9
    more                 cuBLAS                                              11

In exact mode every product is `exact_products`', so that a token has the bits that the modules give it in training.

Parameters are read where they are: an optimizer that changes them in place changes this, too.
"""

import torch
from torch import Tensor, nn

from headway.inference.kv_cache import PagedKvCache, PassCache
from headway.kernels import batch_invariant, dispatch, exact_products, matrix_vector, rotary_store, sequential_linear
from headway.kernels.even_attention import (
    LEAST_EXACT_SEQUENCES,
    LEAST_SEQUENCES,
    count_runs,
    even_attention,
    takes_evenly,
)
from headway.kernels.gated import swiglu
from headway.kernels.inputs import float32_product
from headway.kernels.paged_attention import fresh_attention
from headway.kernels.paged_triton import processors, takes_heads, triton_attention
from headway.kernels.rms_norm import MAX_WIDTH, forward_early, rms_norm
from headway.kernels.rotary_store import HeadShape
from headway.models.decoder import Embedding
from headway.models.layers import Linear, RMSNorm, silu
from headway.models.llama import Attention, Block, LlamaDecoder

EARLY_ROWS = 512
"""Tokens of a pass up to which kernels start before the one ahead of them has ended."""
FEW_ROWS = 16
"""Tokens up to which the product after attention starts early, too."""
BLAS_ROWS = 2
"""Rows from which cuBLAS is faster where there is nothing to fuse (H200: 6.0 us of 6.8 for 32 rows, 1024 x 2048)."""


class FusedDecoder:
    """Runs passes of a decoder, which `takes_fused` must have accepted."""

    def __init__(self, decoder: LlamaDecoder, pages: PagedKvCache, max_length: int) -> None:
        self.decoder, self.exact = decoder, pages.exact
        model = decoder.model
        self.heads = HeadShape(model.heads, model.kv_heads, model.head_dim)
        device = decoder.output_weight.device
        tables = decoder.context.tables(torch.arange(max_length, device=device), False)  # type: ignore[operator]
        self._table_2LR: Tensor = tables[0].contiguous()
        self._programmatic = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= dispatch.LATEST

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, cache: PassCache) -> Tensor:
        """Return the normalized stream [T, D] after the last block."""
        x_TD = nn.functional.embedding(tokens_T, self.decoder.embed.weight)  # type: ignore[arg-type]
        early = self._programmatic and len(x_TD) <= EARLY_ROWS
        for number, block in enumerate(self.decoder.layers):
            assert isinstance(block, Block)
            x_TD = self._block(block, x_TD, cache, number, early)
        assert isinstance(self.decoder.norm, RMSNorm)
        return self._normed(x_TD, self.decoder.norm, early)

    @torch.inference_mode()
    def logits(self, x_RD: Tensor) -> Tensor:
        """Apply the head, in float32."""
        weight, rows = self.decoder.output_weight, len(x_RD)
        if self.exact:
            return exact_products.product(x_RD, weight, dtype=torch.float32)
        if rows == 1 and matrix_vector.takes(x_RD, weight):
            return matrix_vector.linear(x_RD, (weight,), dtype=torch.float32, early=self._programmatic)
        return float32_product(x_RD, weight)

    def _block(self, block: Block, x_TD: Tensor, cache: PassCache, number: int, early: bool) -> Tensor:
        attention, mlp = block.attention, block.mlp
        if len(x_TD) == 1 and not self.exact:
            norm = block.attention_norm.weight, block.attention_norm.eps
            weights, biases = _qkv(attention)
            qkv_TF = matrix_vector.linear(x_TD, weights, biases, norm=norm, early=early)
            y_TF = self._attend(attention, self._parts(qkv_TF), cache, number, early)
            matrix_vector.linear_into(x_TD, y_TF, attention.o.weight, attention.o.bias, early=early)
            norm = block.mlp_norm.weight, block.mlp_norm.eps
            inner_TF = matrix_vector.gated_linear(x_TD, mlp.gate.weight, mlp.up.weight, norm=norm, early=early)
            return matrix_vector.linear_into(x_TD, inner_TF, mlp.down.weight, early=early)
        h_TD = self._normed(x_TD, block.attention_norm, early)
        y_TF = self._attend(attention, self._projected(attention, h_TD, early), cache, number, early)
        # A product that waits for a long attention would take its place on the multiprocessors.
        x_TD = self._added(x_TD, y_TF, attention.o, early and len(x_TD) <= FEW_ROWS)
        h_TD = self._normed(x_TD, block.mlp_norm, early)
        if self._sequential(len(x_TD)):
            inner_TF = sequential_linear.gated_linear(h_TD, mlp.gate.weight, mlp.up.weight, early=early)
        else:
            inner_TF = swiglu(self._product(h_TD, mlp.gate), self._product(h_TD, mlp.up))
        return self._added(x_TD, inner_TF, mlp.down, early)

    def _sequential(self, rows: int) -> bool:
        """Whether fused sequential products are used for so many rows."""
        return rows <= sequential_linear.MOST_ROWS

    def _normed(self, x_TD: Tensor, norm: RMSNorm, early: bool) -> Tensor:
        return forward_early(x_TD, norm.weight, norm.eps) if early else rms_norm(x_TD, norm.weight, norm.eps)

    def _product(self, x_TD: Tensor, layer: Linear) -> Tensor:
        if self.exact:  # without `batch_invariant.linear`'s gradients, which cost the host as much as the launch
            return exact_products.product(x_TD, layer.weight, layer.bias)
        return nn.functional.linear(x_TD, layer.weight, layer.bias)

    def _projected(self, attention: Attention, h_TD: Tensor, early: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        if self._sequential(len(h_TD)):
            weights, biases = _qkv(attention)
            return self._parts(sequential_linear.linear(h_TD, weights, biases, early=early))
        return tuple(self._product(h_TD, layer) for layer in (attention.q, attention.k, attention.v))  # type: ignore[return-value]

    def _parts(self, qkv_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, size = self.heads
        q_TF, k_TF, v_TF = qkv_TF.split((queries * size, keys * size, keys * size), dim=1)
        return q_TF, k_TF, v_TF

    def _attend(
        self, attention: Attention, parts: tuple[Tensor, Tensor, Tensor], cache: PassCache, number: int, early: bool
    ) -> Tensor:
        keys_PZKH, values_PZKH = cache.pages.keys[number], cache.pages.values[number]
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        q_TNH, k_TKH, v_TKH = rotary_store.rotate_and_store(
            *parts, self.heads, self._table_2LR if attention.rotates else None, cache.positions_BL[0],
            cache.batch.slots_T, keys_PZKH, values_PZKH, norms, eps, keeps=cache.batch.fresh and not self.exact,
            early=early,
        )  # fmt: skip
        scale, window = self.heads.size**-0.5, attention.window
        if k_TKH is not None and window is None:
            return fresh_attention(q_TNH, k_TKH, v_TKH, cache.batch, scale).flatten(1)
        if self._evenly(cache, window):
            runs = count_runs(processors(q_TNH.device), self.heads.keys)
            tiles = cache.batch.tile_list(*keys_PZKH.shape[:2], runs, exact=self.exact, early=early)
            return even_attention(q_TNH, keys_PZKH, values_PZKH, tiles, scale, early=early).flatten(1)
        y_TNH = triton_attention(
            q_TNH, keys_PZKH, values_PZKH, cache.batch, scale, window, exact=self.exact, early=early
        )
        return y_TNH.flatten(1)

    def _evenly(self, cache: PassCache, window: int | None) -> bool:
        """Whether decoding sequences have their keys shared out evenly."""
        batch, device = cache.batch, cache.batch.slots_T.device
        least = LEAST_EXACT_SEQUENCES if self.exact else LEAST_SEQUENCES
        if window is not None or not batch.decodes or len(batch.lengths) < least:
            return False
        return takes_evenly(device, self.heads.size, cache.pages.page_size)

    def _added(self, x_TD: Tensor, y_TF: Tensor, layer: Linear, early: bool) -> Tensor:
        """Return x + layer(y)."""
        if self._sequential(len(x_TD)) and (self.exact or len(x_TD) < BLAS_ROWS):
            return sequential_linear.linear_into(x_TD, y_TF, layer.weight, layer.bias, early=early)
        if self.exact or layer.bias is not None:
            return x_TD + self._product(y_TF, layer)
        return x_TD.addmm_(y_TF, layer.weight.t())


def _qkv(attention: Attention) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    layers = attention.q, attention.k, attention.v
    return tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)


def takes_fused(module: nn.Module, device: torch.device) -> bool:
    """Whether the fused kernels run a model: plain Llama-like blocks in half precision on a GPU since Hopper.

    Tiles are cut for the shared memory of those.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < dispatch.LATEST:
        return False
    if device.type not in dispatch.devices or type(module) is not LlamaDecoder or module.softcap is not None:
        return False
    model = module.model
    heads = HeadShape(model.heads, model.kv_heads, model.head_dim)
    if model.rotary_dim != model.head_dim or model.switch_length is not None or model.mlp_bias:
        return False
    if not rotary_store.takes(heads) or not takes_heads(device, heads.size, heads.size) or model.dim > MAX_WIDTH:
        return False
    if type(module.embed) is not Embedding or module.embed.scale != 1:
        return False
    layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    plain = all(type(child) is Linear for child in layers)
    gates = all(block.mlp.activation in (silu, batch_invariant.silu) for block in module.layers)  # type: ignore[union-attr,operator]
    halves = device.type != "cuda" or module.output_weight.dtype in (torch.bfloat16, torch.float16)
    like = module.output_weight
    return plain and gates and halves and sequential_linear.takes(like, like, *(child.weight for child in layers))
