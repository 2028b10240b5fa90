"""What is computed again in the backward pass: counted in matrix products, the gradients staying the same."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models import empty_decoder, init_weights
from headway.parallel import World, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe.load import parse_recipe
from headway.state.tensors import fill

LAYERS = 4
PRODUCTS = 7
"""Matrix products of a block's forward pass: queries, keys, values, output, gate, up, down."""


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.attentions += "attention" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


def run(**train: Any) -> tuple[Count, dict[str, torch.Tensor]]:
    values = {
        "model": {"layers": LAYERS, "dim": 32, "heads": 4, "vocab_size": 64},
        "data": {"path": "nowhere", "seq": 16},
        "train": {"batch": 2} | train,
    }
    recipe = parse_recipe(values, {}, "test")
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, World(0, 1, torch.device("cpu")))
    plain = empty_decoder(recipe.model)
    init_weights(plain, seed=0)
    for (name, parameter), whole in zip(spread.model.named_parameters(), plain.parameters(), strict=True):
        fill(name, parameter, whole)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with Count() as count:
        spread.passes(DeviceBatch(tokens, tokens), SumScale.per_label(1))
    return count, {name: parameter.grad for name, parameter in spread.model.named_parameters()}


@pytest.mark.parametrize(
    ("train", "products", "attentions"),
    [
        ({"recompute": "full"}, LAYERS * PRODUCTS, LAYERS),
        ({"recompute": "full", "recompute_blocks": 1}, PRODUCTS, 1),
        ({"recompute": "full", "recompute_blocks": 0}, 0, 0),
        ({"recompute": "selective"}, 0, 0),
        ({"recompute": "except-attention"}, LAYERS * PRODUCTS, 0),
        ({"recompute": "none"}, 0, 0),
    ],
    ids=str,
)
def test_recomputed_products(train: dict[str, Any], products: int, attentions: int) -> None:
    plain, gradients = run()
    count, recomputed = run(**train)
    # The last product of a block (down) has a result that nobody needs again: PyTorch stops before it.
    blocks = products // PRODUCTS
    assert plain.products <= count.products <= plain.products + products
    assert count.products >= plain.products + products - blocks
    assert count.attentions == plain.attentions + attentions
    for name, gradient in gradients.items():
        assert torch.equal(recomputed[name], gradient), name


def test_each_policy_keeps_less_than_the_one_before() -> None:
    kept = [kept_bytes(kind) for kind in ("none", "selective", "except-attention", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


def kept_bytes(kind: str) -> int:
    """What a forward pass has allocated and not given back when it ends, by PyTorch's profiler."""
    values = {
        "model": {"layers": 4, "dim": 64, "heads": 4, "vocab_size": 64},
        "data": {"path": "nowhere", "seq": 64},
        "train": {"batch": 2, "recompute": kind},
    }
    recipe = parse_recipe(values, {}, "test")
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, World(0, 1, torch.device("cpu")))
    for parameter in spread.model.parameters():
        torch.nn.init.ones_(parameter)
    tokens = torch.zeros((2, 64), dtype=torch.int64)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        loss = spread.model(tokens, tokens)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())
