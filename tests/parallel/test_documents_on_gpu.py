"""Packed documents on a GPU: cuDNN over ragged rows gives what masks give, alone and in compiled blocks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headway.kernels import document_attention
from headway.kernels.document_attention import document_starts
from headway.models import empty_decoder, initial_weight
from headway.models.attention import attend_all
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill

pytestmark = pytest.mark.gpu
ROWS, SEQ, VOCABULARY = 4, 1024, 500


def packed(lengths: list[list[int]]) -> DeviceBatch:
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1)).cuda()
    numbers = [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    documents = torch.tensor(numbers, dtype=torch.int32)
    return DeviceBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents.cuda(), host_documents=documents.numpy()
    )


def both_passes(mask: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend_all(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_attention_is_that_of_the_mask_and_repeats_bits_where_asked(head: int, deterministic: bool) -> None:
    assert document_attention.works(head)
    numbers = [np.repeat(np.arange(len(row)), row) for row in ([700, 1, 323], [SEQ], [5, 1019])]
    documents = torch.from_numpy(np.stack(numbers).astype(np.int32)).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(*documents.shape, heads, head) for heads in (8, 2, 2, 8)]
    tensors = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]
    mask = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
    want = masked_passes(mask, *(x.float() for x in tensors))
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = [both_passes(document_starts(documents, 16), *tensors) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, again, truth in zip(*runs, want, strict=True):
        assert (ours.float() - truth).norm() < 1e-2 * truth.norm()
        assert not deterministic or torch.equal(ours, again)


def masked_passes(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The same by PyTorch, in float32."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in leaves]
    out = nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("recompute", ["none", "except-attention"])
def test_a_compiled_step_on_packed_documents_is_that_of_flex_attention(recompute: str) -> None:
    """Also with another number of documents; the host waits for the device in none of the passes."""
    assert document_attention.works(64)
    values: dict[str, Any] = {"model": {"layers": 2, "dim": 512, "heads": 8, "kv_heads": 2, "vocab_size": VOCABULARY}}
    values |= {"data": {"path": "-", "seq": SEQ}}
    values["train"] = {"batch": ROWS, "microbatch": 2, "dtype": "bfloat16", "recompute": recompute}
    recipe = parse_recipe(values, {}, "test")
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, World(0, 1, torch.device("cuda", 0)))
    assert spread.ragged
    parameters = dict(spread.model.named_parameters())
    for name, parameter in parameters.items():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    few = packed([[SEQ], [1000, 24], [1, 500, 523], [SEQ]])
    many = packed([[64] * 16] * ROWS)
    results: dict[str, list[torch.Tensor]] = {}
    for name, batch in (("few", few), ("many", many), ("flex", replace(few, host_documents=None))):
        spread.model.zero_grad(set_to_none=True)
        spread.passes(batch, SumScale.per_label(ROWS * SEQ))  # compiles
        spread.model.zero_grad(set_to_none=True)
        torch.cuda.set_sync_debug_mode("default" if name == "flex" else "error")
        try:
            loss = spread.passes(batch, SumScale.per_label(ROWS * SEQ))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results[name] = [loss.clone(), *(parameter.grad.clone() for parameter in parameters.values())]
    assert not torch.equal(results["few"][0], results["many"][0]), "attention was not kept within documents"
    for ragged, flex in zip(results["few"], results["flex"], strict=True):
        assert (ragged - flex).norm() < 2e-2 * flex.norm()
