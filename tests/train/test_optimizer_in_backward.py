"""Updates inside the backward pass: the same bits as after it, with one block's gradients at a time."""

import copy

import pytest
import torch
from torch import nn

from headway.errors import RecipeError
from headway.parallel import World
from headway.recipe import FaultPlan, Train
from headway.train.optimizer_in_backward import OptimizerInBackward

WORLD = World(0, 1, torch.device("cpu"))
EARLY = {"train.clip": 0.0, "train.update_in_backward": True, "checkpoint.every_steps": 4}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().sum()


class Seen(torch.optim.SGD):
    """Notes whose gradients are there at each update."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.model, self.seen = model, list[set[str]]()

    def step(self, closure=None) -> None:
        self.seen.append({name for name, parameter in self.model.named_parameters() if parameter.grad is not None})
        super().step(closure)


def test_one_blocks_gradients_at_a_time_and_the_same_weights() -> None:
    torch.manual_seed(0)
    early, plain = (model := Small()), copy.deepcopy(model)
    early.blocks[1][0].bias.requires_grad_(False)
    plain.blocks[1][0].bias.requires_grad_(False)
    optimizer, usual = Seen(early), torch.optim.SGD(plain.parameters(), lr=0.01)
    updates = OptimizerInBackward(list(early.blocks), optimizer, WORLD)
    for x in torch.randn(3, 5, 4):
        plain(x).backward()
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
        )
        usual.step()
        usual.zero_grad()
        early(x).backward()
        assert updates.norm(dict(early.named_parameters())) == pytest.approx(norm.item(), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, other in zip(early.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
    of_blocks = [
        {f"blocks.{n}.{name}" for name, parameter in early.blocks[n].named_parameters() if parameter.requires_grad}
        for n in (2, 1, 0)
    ]
    rest = {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert optimizer.seen == [*of_blocks, rest] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"train.recompute": "full", "train.optimizer": "muon", "train.freeze": ["layers.0.**"],
                      "train.ema": 0.9}, marks=pytest.mark.slow),
        pytest.param({"train.dtype": "bfloat16", "train.weights": "bfloat16", "train.moments": "bfloat16",
                      "data.seq": 8}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_has_the_same_weights_and_losses_and_resumes_exactly(lab, recipe, settings) -> None:
    plain = lab.train(recipe(settings | EARLY | {"train.update_in_backward": False}))
    early = lab.train(recipe(settings | EARLY))
    steps = [result.events("step") for result in (early, plain)]
    assert [event["loss"] for event in steps[0]] == [event["loss"] for event in steps[1]]
    norms = [[event["grad_norm"] for event in events] for events in steps]
    # of bfloat16 gradients a CPU's norm is of that precision, and the sum of blocks' squares is of float32
    assert norms[0] == pytest.approx(norms[1], rel=1e-2 if "train.weights" in settings else 1e-5)
    assert early.digest == plain.digest
    killed = lab.train(recipe(settings | EARLY), faults=FaultPlan().kill(6))
    assert lab.resume(killed.run).digest == plain.digest


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clip": 1.0}, "needs clip = 0, not 1"),
        ({"clip": 0.0, "batch": 8, "microbatch": 4}, "needs microbatch = batch \\(8\\), not 4"),
        ({"clip": 0.0, "batch": 8, "batch_ramp": ((5, 16),)}, "needs microbatch = batch \\(16\\), not 8"),
        ({"clip": 0.0, "offload_optimizer": True}, "offload_optimizer"),
    ],
)
def test_incompatible_settings_are_refused(settings, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Train(update_in_backward=True, **settings)


def test_several_workers_are_refused(lab, recipe) -> None:
    with pytest.raises(RecipeError, match="needs 1 worker, not 2"):
        lab.train(recipe(EARLY), workers=2)
