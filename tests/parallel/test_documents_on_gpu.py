"""Compiled blocks on packed documents on a GPU: cuDNN over ragged rows and flex attention give the same step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.kernels import document_attention
from headway.models import empty_decoder, initial_weight
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale, count_documents
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill

ROWS, SEQ, VOCABULARY = 4, 1024, 500


def packed(lengths: list[list[int]]) -> DeviceBatch:
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1)).cuda()
    numbers = [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    documents = torch.tensor(numbers, dtype=torch.int32)
    counts = count_documents(documents.numpy())
    return DeviceBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents.cuda(), document_counts=counts
    )


@pytest.mark.gpu
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
    for name, batch in (("few", few), ("many", many), ("flex", replace(few, document_counts=None))):
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
