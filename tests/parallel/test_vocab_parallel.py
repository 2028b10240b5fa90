"""Where the vocabulary is shared out, no worker ever holds all logits of a token."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.models import empty_decoder
from headway.parallel import make_mesh, parallelize_model
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe
from headway.recipe.load import parse_recipe
from processes import run_ranks

VOCABULARY, ROWS, SEQ = 77, 4, 16


class Widths(TorchDispatchMode):
    """Collects the last dim of everything that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {
            leaf.shape[-1] for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1
        }
        return result


def story(rank: int, workers: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    world = make_mesh(rank, workers, torch.device("cpu"), recipe.parallel.sizes(workers))
    spread = parallelize_model(empty_decoder(recipe.model, "meta"), recipe, world)
    for parameter in spread.model.parameters():
        torch.nn.init.ones_(parameter)
    tokens = torch.zeros((ROWS, SEQ), dtype=torch.int64)
    with Widths() as widths:
        spread.passes(DeviceBatch(tokens, tokens), SumScale.per_label(1))
    return {"widths": torch.tensor(sorted(widths.seen))}


@pytest.mark.parametrize("tied", [True, False])
def test_no_worker_has_a_tensor_as_wide_as_the_vocabulary(tied: bool, tmp_path) -> None:
    values = {
        "model": {"layers": 1, "dim": 32, "heads": 2, "vocab_size": VOCABULARY, "tie_embeddings": tied},
        "data": {"path": "nowhere", "seq": SEQ},
        "train": {"batch": ROWS},
        "parallel": {"tensor": 2, "shard": 1},
    }
    shares = (39, 38)
    for share, result in zip(shares, run_ranks(tmp_path, 2, story, parse_recipe(values, {}, "test")), strict=True):
        assert share in result["widths"], "its own share of the logits is there"
        assert VOCABULARY not in result["widths"]
