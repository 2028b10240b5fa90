"""Forward and backward passes as one CUDA graph: the host launches one thing where it launched hundreds.

Where a step's kernels are short, launching them takes the host longer than the device takes to run them. So the passes
of one GPU are recorded once, after a few that go the usual way, and replayed from then on. What is replayed are the
same kernels in the same order: the same bits. Only a step whose shape stays the same can be replayed, and documents
make every step another one; a new shape, of a batch that grows, is recorded anew.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.models.experts import Experts
from headway.parallel import ParallelModel, World
from headway.recipe import Recipe

__all__ = ["GraphedPasses", "passes_of"]

WARM = 3
"""Passes that go the usual way first: they compile, and choose kernels by trying them."""
RECORDINGS = 8
"""So many shapes are recorded; whoever has more of them has one for every step."""
SMALL_FLOPS = 2.4e12
"""Of a block's forward and backward pass: some 6 ms on an H200. Its host takes 2 to 2.5 ms to launch them."""
Passes = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
_Shape = tuple[torch.Size, float]


def passes_of(spread: ParallelModel, recipe: Recipe, world: World) -> Passes:
    """A step's passes: those of the model, or a recording of them."""
    if world.device.type != "cuda" or world.size > 1 or recipe.train.update_in_backward:
        return spread.passes
    asked = recipe.train.cuda_graphs
    return GraphedPasses(spread) if (_host_is_slower(spread, recipe) if asked is None else asked) else spread.passes


def _host_is_slower(spread: ParallelModel, recipe: Recipe) -> bool:
    """Whether launching a block's passes takes about as long as they do. Experts and classes of one's own are left
    alone: who knows what they ask the device on their way."""
    blocks = spread.stages[0].blocks
    if not blocks or not recipe.compiles("cuda") or recipe.model.class_ is not None or _experts(spread):
        return False
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / len(blocks)
    return 6 * weights * spread.microbatch * recipe.data.seq < SMALL_FLOPS


def _experts(spread: ParallelModel) -> bool:
    return any(isinstance(module, Experts) for module in spread.model.modules())


@dataclass(frozen=True)
class _Recording:
    """Passes of one shape, and where what they take and make lies."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    labels: Tensor
    loss: Tensor
    gradients: tuple[tuple[nn.Parameter, Tensor], ...]


class GraphedPasses:
    """`Spread.passes` on one GPU, recorded and replayed."""

    def __init__(self, spread: ParallelModel) -> None:
        self._spread = spread
        self._recording: _Recording | None = None
        self._shape: _Shape | None = None
        self._passed = self._recorded = 0

    def __call__(self, inputs: Tensor, labels: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """Gradients are left in `.grad`, which must be None before; the loss stays as it is until the next call."""
        if (documents is not None and self._spread.documents) or self._recorded > RECORDINGS:
            return self._spread.passes(inputs, labels, scale, documents)
        if self._shape != (inputs.shape, scale):
            self._shape, self._recording, self._passed = (inputs.shape, scale), None, 0
        if self._recording is None and self._passed == WARM:
            self._recording = self._record(inputs, labels, scale)
        if self._recording is None:
            self._passed += 1
            return self._spread.passes(inputs, labels, scale)
        recording = self._recording
        recording.inputs.copy_(inputs)
        recording.labels.copy_(labels)
        recording.graph.replay()
        for parameter, gradient in recording.gradients:
            parameter.grad = gradient
        return recording.loss

    def _record(self, inputs: Tensor, labels: Tensor, scale: float) -> _Recording | None:
        """None where something in the passes cannot be recorded; then nothing is any more."""
        self._recorded += 1
        parameters = list(self._spread.model.parameters())
        inputs, labels, graph = inputs.clone(), labels.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a recording has memory of its own, and needs what the first passes had
        try:
            # Other threads go on: they copy states to the host.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = self._spread.passes(inputs, labels, scale)
        except RuntimeError as error:
            logging.getLogger(__name__).warning("passes are not replayed: %s", str(error).splitlines()[0])
            self._recorded = RECORDINGS + 1
            for parameter in parameters:
                parameter.grad = None
            return None
        gradients = tuple((one, one.grad) for one in parameters if one.grad is not None)
        return _Recording(graph, inputs, labels, loss, gradients)
