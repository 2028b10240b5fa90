"""Optimizer state per parameter: moments, master copies, averages; none for frozen parameters.

Mirrors `train/optim/` by names and shapes; a test compares with the optimizers' tensors. Step counters, four bytes per
tensor, are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from headway.recipe import Lora, Model, Train
from headway.recipe.lora import adapter_tensors
from headway.recipe.patterns import first_match

BLOCKS = "layers."
EIGHTBIT_BLOCK = 256
LEAST_EIGHTBIT = 4096
MUON_STEPS = 5

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerFootprint:
    """Average per parameter, in blocks and outside of them: pipelines place the two on different ranks."""

    block_bytes: float
    """State bytes per parameter in blocks."""
    rest_bytes: float
    block_trained: float = 1.0
    """Share that is trained."""
    rest_trained: float = 1.0
    block_flops: float = 0.0
    """FLOPs of an update per parameter in blocks."""


def optimizer_footprint(model: Model, train: Train, lora: Lora | None = None) -> OptimizerFootprint | None:
    """State of a recipe's optimizer; None for AdamW on all parameters, which `Software` describes."""
    if lora is not None:
        return _adapter_footprint(model, train, lora)
    if train.optimizer == "adamw" and not train.freeze and train.ema is None:
        return None
    shapes = model.tensors()

    def mean(value: Callable[[str, Shape, Train], float], in_blocks: bool) -> float:
        parts = {name: shape for name, shape in shapes.items() if name.startswith(BLOCKS) == in_blocks}
        total = sum(value(name, shape, train) for name, shape in parts.items())
        return total / max(1, sum(map(math.prod, parts.values())))

    return OptimizerFootprint(
        mean(optimizer_state_bytes, True),
        mean(optimizer_state_bytes, False),
        mean(_trained_parameters, True),
        mean(_trained_parameters, False),
        mean(update_flops, True),
    )


def _adapter_footprint(model: Model, train: Train, lora: Lora) -> OptimizerFootprint:
    """State of the adapters, as an average over the parameters of the base."""
    adapters = adapter_tensors(model, lora)
    block = sum(math.prod(shape) for name, shape in model.tensors().items() if name.startswith(BLOCKS))
    state_bytes = sum(optimizer_state_bytes(name, shape, train) for name, shape in adapters.items())
    flops = sum(update_flops(name, shape, train) for name, shape in adapters.items())
    trained = sum(map(math.prod, adapters.values())) / block
    return OptimizerFootprint(state_bytes / block, 0.0, trained, 0.0, flops / block)


def optimizer_state_bytes(name: str, shape: Shape, train: Train) -> float:
    """State bytes of one parameter."""
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
    """GEMM FLOPs of one parameter's update: Muon's five Newton-Schulz steps, three GEMMs each."""
    if train.optimizer != "muon" or not _is_matrix(name, shape) or not _trained(name, train):
        return 0
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * MUON_STEPS * (4 * short**2 * long + 2 * short**3)


def _trained(name: str, train: Train) -> bool:
    return first_match([train.freeze], name) is None


def _trained_parameters(name: str, shape: Shape, train: Train) -> int:
    return math.prod(shape) * _trained(name, train)


def _is_matrix(name: str, shape: Shape) -> bool:
    """Whether it is a matrix in a block, or a stack of them: what Muon and 8-bit states apply to."""
    in_block = name.startswith(BLOCKS) and not name.endswith("bias") and ".router." not in name
    return in_block and len(shape) in (2, 3)
