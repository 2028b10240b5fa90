"""muP: what a model computes stays as large as it is while the model grows wider, also after steps of Adam.

The coordinate check of "Tensor Programs V" (Yang et al. 2022), appendix D.1: activations are measured after each of a
few updates, for growing widths, and must neither grow nor shrink with the width.
"""

import math

import pytest
import torch

from headway.models import empty_decoder, init_weights
from headway.recipe import Model

WIDTHS = (32, 64, 128)
BASE = 32
STEPS = 4


def sizes_of_activations(width: int, mup: bool) -> dict[str, float]:
    """How much a few updates change what blocks and the head make, in the mean over all numbers."""
    model = Model(
        vocab_size=97, layers=2, dim=width, heads=width // 16, hidden=2 * width, tie_embeddings=False, init_std=0.1,
        mup_base=BASE if mup else None,
    )  # fmt: skip
    decoder = empty_decoder(model)
    init_weights(decoder, seed=0)
    torch.nn.init.zeros_(decoder.head.weight)  # in both, so that logits show what was learnt and nothing else
    groups = [{"params": [p], "lr": 0.01 * model.rate_factor(name)} for name, p in decoder.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tokens = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(1))
    seen = dict[str, torch.Tensor]()
    for i, block in enumerate(decoder.layers):
        block.attention.register_forward_hook(lambda _, __, out, i=i: seen.update({f"attention {i}": out.detach()}))
        block.mlp.register_forward_hook(lambda _, __, out, i=i: seen.update({f"mlp {i}": out.detach()}))
    first = dict[str, torch.Tensor]()
    for step in range(STEPS + 1):
        with torch.no_grad():
            seen["logits"] = decoder(tokens[:, :-1])
        first = first or dict(seen)
        if step < STEPS:
            optimizer.zero_grad()
            decoder(tokens[:, :-1], tokens[:, 1:]).div(4 * 32).backward()
            optimizer.step()
    return {name: float((value - first[name]).abs().mean()) for name, value in seen.items()}


def slope(sizes: list[float]) -> float:
    """How a size grows with the width, as a power of it: least squares in logarithms."""
    x = [math.log(width) for width in WIDTHS]
    y = [math.log(size) for size in sizes]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


@pytest.mark.parametrize("mup", [True, False], ids=["muP", "plain"])
def test_coordinate_check(mup: bool) -> None:
    """What updates change does not depend on the width with muP, and grows with it without."""
    measured = [sizes_of_activations(width, mup) for width in WIDTHS]
    slopes = {name: slope([sizes[name] for sizes in measured]) for name in measured[0]}
    if mup:
        assert all(abs(value) < 0.25 for value in slopes.values()), slopes
    else:
        assert all(value > 0.4 for value in slopes.values()), slopes


def test_a_model_as_wide_as_its_base_is_the_plain_one() -> None:
    plain = Model(vocab_size=97, dim=64, tie_embeddings=False)
    scaled = Model(vocab_size=97, dim=64, tie_embeddings=False, mup_base=64)
    for name in plain.tensors().keys() - {"head.weight"}:
        assert plain.initial(name) == scaled.initial(name)
        assert scaled.rate_factor(name) == 1.0


def test_a_tied_head_is_refused() -> None:
    with pytest.raises(ValueError, match="tie_embeddings = false"):
        Model(vocab_size=97, dim=64, mup_base=32)
