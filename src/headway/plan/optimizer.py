"""What training keeps of each parameter beside its weight: moments, master copies, averages; nothing of frozen ones.

Facts of `train/optim/`, by names and shapes alone; a test holds them against the optimizers' own tensors. Counters of
steps, four bytes a tensor, are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headway.recipe import Model, Train
from headway.recipe.patterns import first_match

__all__ = ["OptimizerFootprint", "optimizer_footprint", "optimizer_state_bytes", "update_flops"]

BLOCKS = "layers."
EIGHTBIT_BLOCK = 256
LEAST_EIGHTBIT = 4096
MUON_STEPS = 5

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerFootprint:
    """Of a model's parameters, on the average: of those in blocks, and of those outside, which pipelines keep apart."""

    block_bytes: float
    """Kept beside each parameter in blocks."""
    rest_bytes: float
    block_trained: float = 1.0
    """Share of them that is trained."""
    rest_trained: float = 1.0
    block_flops: float = 0.0
    """Of an update, for each parameter in blocks."""


def optimizer_footprint(model: Model, train: Train) -> OptimizerFootprint | None:
    """What a recipe's optimizer keeps; None for AdamW on all parameters, of which `Software` says enough."""
    if train.optimizer == "adamw" and not train.freeze and train.ema is None:
        return None
    shapes = model.tensors()
    inside, outside = (
        [(name, shape) for name, shape in shapes.items() if name.startswith(BLOCKS) == within]
        for within in (True, False)
    )

    def mean(parts: list[tuple[str, Shape]], values: Iterator[float]) -> float:
        return sum(values) / max(1, sum(math.prod(shape) for _, shape in parts))

    return OptimizerFootprint(
        mean(inside, (optimizer_state_bytes(name, shape, train) for name, shape in inside)),
        mean(outside, (optimizer_state_bytes(name, shape, train) for name, shape in outside)),
        mean(inside, (math.prod(shape) * _trained(name, train) for name, shape in inside)),
        mean(outside, (math.prod(shape) * _trained(name, train) for name, shape in outside)),
        mean(inside, (update_flops(name, shape, train) for name, shape in inside)),
    )


def optimizer_state_bytes(name: str, shape: Shape, train: Train) -> float:
    """Beside one parameter's weight."""
    if not _trained(name, train):
        return 0
    count = math.prod(shape)
    copies = 4 * count * (train.master + (train.ema is not None))
    moment = 2 if train.moments == "bfloat16" else 4
    if train.optimizer == "adafactor":
        return copies + 4 * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)
    if train.optimizer == "muon" and _is_matrix(name, shape):
        return copies + moment * count
    if train.optimizer == "adamw-8bit" and _is_matrix(name, shape) and count >= LEAST_EIGHTBIT:
        return copies + 2 * (count + 4 * count // shape[-1] * -(-shape[-1] // EIGHTBIT_BLOCK))
    return copies + 2 * moment * count


def update_flops(name: str, shape: Shape, train: Train) -> float:
    """Of the products in one parameter's update: Muon's, whose five steps have three of them each."""
    if train.optimizer != "muon" or not _is_matrix(name, shape) or not _trained(name, train):
        return 0
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * MUON_STEPS * (4 * short**2 * long + 2 * short**3)


def _trained(name: str, train: Train) -> bool:
    return first_match([train.freeze], name) is None


def _is_matrix(name: str, shape: Shape) -> bool:
    """One inside of a block, or a stack of them: what Muon and eight bits are for."""
    stands = name.startswith(BLOCKS) and not name.endswith("bias") and ".router." not in name
    return stands and len(shape) in (2, 3)
