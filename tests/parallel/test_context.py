"""Parts of sequences: who has which, attention in pieces against attention at once, and the balance of experts."""

from itertools import product
from typing import Any

import pytest
import torch

from headway.errors import ModelError
from headway.models import empty_decoder, initial_weight
from headway.models.attention import attention_mask, see
from headway.parallel import World, make_mesh, parallelize_model
from headway.parallel.apply import check_sequences
from headway.parallel.context import SequenceParts, merged, weighted
from headway.parallel.objective import DeviceBatch, SumScale
from headway.parallel.world import Axis
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill
from processes import run_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_have_every_token_once_and_equal_causal_work(size: int) -> None:
    positions = torch.arange(12 * size)
    own = [SequenceParts(Axis(size, rank)).take(positions, dim=0) for rank in range(size)]
    assert torch.equal(torch.cat(own).sort().values, positions)
    assert len({int((part + 1).sum()) for part in own}) == 1, "each query attends to as many keys as it has a position"


@pytest.mark.parametrize("size", [2, 3])
def test_parts_by_rank_are_put_in_order_and_back(size: int) -> None:
    whole = torch.rand(2, 6 * size, 3)
    by_rank = torch.cat([SequenceParts(Axis(size, rank)).take(whole) for rank in range(size)], dim=1)
    parts = SequenceParts(Axis(size, 0))
    assert torch.equal(parts.ordered(by_rank), whole)
    assert torch.equal(parts.by_rank(whole), by_rank)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "packed"),
    [(None, None, False, False), (5, None, True, True), (None, 2.0, False, True), (3, 1.5, True, False)],
)
def test_merged_pieces_equal_attention_at_once(
    window: int | None, softcap: float | None, sinks: bool, packed: bool
) -> None:
    """Values and gradients, of some queries over keys in pieces, of which a query may see nothing."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 12, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(4, generator=generator).requires_grad_() if sinks else None
    documents = (torch.rand(2, 12, generator=generator) < 0.3).cumsum(dim=1) if packed else None
    places = torch.arange(12)
    mask = attention_mask(places, places, window, documents, documents)
    parts = [
        weighted(q, k[:, low : low + 4], v[:, low : low + 4], mask[..., low : low + 4], None, softcap)
        for low in (8, 0, 4)
    ]
    leaves = [q, k, v, *([] if weights is None else [weights])]
    direction = torch.randn(2, 12, 4, 8, generator=generator)
    pieces = merged(parts, weights)
    # softmax in float64, without Headway's functions
    scores = torch.einsum("blnh,bsnh->bnls", q.double(), k.double().repeat_interleave(2, dim=2)) / 8**0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    powers = scores.masked_fill(~mask, float("-inf")).exp()
    total = powers.sum(dim=-1) + (0 if weights is None else weights.double().exp().view(1, -1, 1))
    truth = torch.einsum("bnls,bsnh->blnh", powers / total.unsqueeze(-1), v.double().repeat_interleave(2, dim=2))
    torch.testing.assert_close(pieces.double(), truth, rtol=1e-5, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(pieces, leaves, direction),
        torch.autograd.grad(truth, leaves, direction.double()),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("first", [0, 2, 5])
def test_masks_of_later_queries_name_each_pair(first: int, window: int | None) -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]])
    mask = see(8, [window], documents, torch.device("cpu"), "masked", first)[window]
    assert isinstance(mask, torch.Tensor)
    for row, query, key in product(range(2), range(first, 8), range(8)):
        near = key <= query and (window is None or query - key < window)
        assert bool(mask[row, 0, query - first, key]) == (near and bool(documents[row, query] == documents[row, key]))


def test_a_model_without_headway_s_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear is none of Headway's decoders"):
        check_sequences(torch.nn.Linear(2, 2), 2)


# -- the balance of experts, whose shares of tokens are those of whole sequences


def make_recipe(mesh: dict[str, Any]) -> Recipe:
    model = {
        "family": "mixtral", "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 64, "vocab_size": 99,
        "experts": 4, "top_k": 2, "balance": 10.0,
    }  # fmt: skip
    values = {"model": model, "data": {"path": "-", "seq": 16}, "train": {"batch": 4, "microbatch": 2}}
    return parse_recipe(values | ({"parallel": mesh} if mesh else {}), {}, "test")


def gradients(recipe: Recipe, world: World) -> dict[str, torch.Tensor]:
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for name, parameter in spread.model.named_parameters():
        fill(name, parameter, initial_weight(recipe.model, name, tuple(parameter.shape), 0))
    tokens = torch.randint(0, 99, (4, 17), generator=torch.Generator().manual_seed(1))
    spread.passes(DeviceBatch(tokens[:, :-1], tokens[:, 1:]), SumScale.per_label(64))
    named = spread.model.named_parameters()
    return {name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for name, p in named if "router" in name}


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    return gradients(recipe, make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers)))


@pytest.mark.slow
def test_experts_are_balanced_over_whole_sequences(tmp_path) -> None:
    truth = gradients(make_recipe({}), World(0, 1, torch.device("cpu")))
    assert truth
    for results in run_ranks(tmp_path, 2, story, make_recipe({"context": 2, "shard": 1})):
        for name, value in results.items():
            torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-6)
