"""Forward and backward passes as one CUDA graph: one launch instead of hundreds.

Where kernels are short, the host takes longer to launch them than the device to run them. So the passes of one GPU are
captured once, after a few eager ones, and then replayed: the same kernels in the same order, the same bits. Replay
needs a constant shape, which document masks do not have; a new shape, as in a batch ramp, is captured anew.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.experts import Experts
from headway.parallel import ParallelModel, World
from headway.parallel.objective import DeviceBatch, SumScale
from headway.recipe import Recipe

WARM = 3
"""Eager passes before the capture: they compile and autotune."""
RECORDINGS = 8
"""Most shapes to capture; with more of them, every step may have its own."""
SMALL_FLOPS = 2.4e12
"""FLOPs of a block's forward and backward pass: about 6 ms on an H200, whose host needs 2 to 2.5 ms to launch them."""
Passes = Callable[[DeviceBatch, SumScale], Tensor]
_Shape = tuple[torch.Size, SumScale]


def passes_of(spread: ParallelModel, recipe: Recipe, world: World) -> Passes:
    """Return the passes of a step, eager or captured."""
    drops = recipe.lora is not None and recipe.lora.dropout > 0  # a replay would need each step's seed
    if world.device.type != "cuda" or world.size > 1 or recipe.train.update_in_backward or drops:
        return spread.passes
    asked = recipe.train.cuda_graphs
    return GraphedPasses(spread) if (_host_is_slower(spread, recipe) if asked is None else asked) else spread.passes


def _host_is_slower(spread: ParallelModel, recipe: Recipe) -> bool:
    """Whether a block's launches take about as long as its kernels. Experts and custom classes are excluded: they may
    synchronize with the device."""
    blocks = spread.stages[0].blocks
    if not blocks or not recipe.compiles("cuda") or recipe.model.class_ is not None or _experts(spread):
        return False
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / len(blocks)
    return 6 * weights * spread.microbatch * recipe.data.seq < SMALL_FLOPS


def _experts(spread: ParallelModel) -> bool:
    return any(isinstance(module, Experts) for module in spread.model.modules())


@dataclass(frozen=True)
class _Recording:
    """The captured passes of one shape, with their input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    labels: Tensor
    loss: Tensor
    gradients: tuple[tuple[Tensor, Tensor], ...]


class GraphedPasses:
    """`ParallelModel.passes` on one GPU, captured and replayed."""

    def __init__(self, spread: ParallelModel) -> None:
        self._spread = spread
        self._recording: _Recording | None = None
        self._shape: _Shape | None = None
        self._passed = self._recorded = 0

    def __call__(self, batch: DeviceBatch, scale: SumScale) -> Tensor:
        """Run the passes. Gradients are left in `.grad`, which must be None before; the loss is valid until the next
        call."""
        needs_more = (batch.documents is not None and self._spread.documents) or self._spread.head is not None
        if needs_more or self._recorded > RECORDINGS:
            return self._spread.passes(batch, scale)
        if self._shape != (batch.inputs.shape, scale):
            self._shape, self._recording, self._passed = (batch.inputs.shape, scale), None, 0
        if self._recording is None and self._passed == WARM:
            self._recording = self._record(batch.inputs, batch.labels, scale)
        if self._recording is None:
            self._passed += 1
            return self._spread.passes(batch, scale)
        recording = self._recording
        recording.inputs.copy_(batch.inputs)
        recording.labels.copy_(batch.labels)
        recording.graph.replay()
        for parameter, gradient in recording.gradients:
            parameter.grad = gradient
        return recording.loss

    def _record(self, inputs: Tensor, labels: Tensor, scale: SumScale) -> _Recording | None:
        """Capture the passes of a shape; return None, and give up on capturing, if something cannot be captured."""
        self._recorded += 1
        float8 = self._spread.float8
        leaves = [] if float8 is None else float8.leaves  # their gradients are what layers observed
        parameters = [*self._spread.model.parameters(), *leaves]
        inputs, labels, graph = inputs.clone(), labels.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a capture has its own memory pool, and needs that of the eager passes
        try:
            # Other threads continue meanwhile: they copy states to the host.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._spread.passes(DeviceBatch(inputs, labels), scale)
        except RuntimeError as error:
            logging.getLogger(__name__).warning("cannot capture CUDA graphs: %s", str(error).splitlines()[0])
            self._recorded = RECORDINGS + 1
            for parameter in parameters:
                parameter.grad = None
            return None
        gradients = tuple((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
        return _Recording(graph, inputs, labels, loss, gradients)
