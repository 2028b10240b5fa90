"""The pipeline axis: a model's blocks are spread over stages, which pass the stream on.

A stage is the model itself, in which what belongs to other stages passes its input through: names stay those of the
plain model, and its own `forward` runs unchanged. Which stage works on which microbatch when is PyTorch's schedules'
work. Shapes are given to them beforehand, so that nothing but tensors ever travels.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from headway.errors import ModelError
from headway.models import Decoder
from headway.parallel.layout import blocks_of, named
from headway.parallel.world import Axis, World
from headway.recipe import ModelLayout, Parallel

__all__ = ["LocalStage", "PassThrough", "PipelineRunner", "StageSplit", "has_ties", "split", "tie_group"]


@dataclass(frozen=True)
class LocalStage:
    """One stage that this worker has."""

    index: int
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    first: bool = True
    """Whether it takes tokens."""
    last: bool = True
    """Whether it makes the loss."""


@dataclass(frozen=True)
class StageSplit:
    """A model as far as this worker has it."""

    model: nn.Module
    """All of that, by the names of the plain model."""
    stages: tuple[LocalStage, ...]
    count: int = 1
    """Of all workers."""
    borrowed: Mapping[str, str] | None = None
    """Parameters that belong to another stage, of which this one has a copy: name here to name there."""
    lent: tuple[str, ...] = ()
    """Parameters of which another stage has a copy."""


class PassThrough(nn.Module):
    """Stands where another stage's module is; it may lend that module's weight to who needs it here too."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """The input."""
        if not x.is_floating_point():
            raise ModelError(
                "a module of the first stage takes something else than the stream, which later stages cannot pass on",
                hint="positions belong into one module with the tokens' embedding, which model.layout.first names",
            )
        return x


def split(model: nn.Module, layout: ModelLayout, counts: Sequence[int], axis: Axis) -> StageSplit:
    """This worker's stages of a model on the meta device; stage i, of `counts[i]` blocks, is on rank i % ranks."""
    name, blocks = blocks_of(model, layout)
    ends = [0, *accumulate(counts)]
    ties = _ties(model, layout)
    mine = [i for i in range(len(counts)) if i % axis.size == axis.rank]
    has_first, has_last = mine[0] == 0, mine[-1] == len(counts) - 1
    if has_last and _lends(model):
        model = _with(model, {"embed": PassThrough(model.embed.weight)})  # type: ignore[union-attr, arg-type]

    def part(own: Sequence[int], first: bool, last: bool) -> nn.Module:
        return _with(model, dict(_elsewhere(model, layout, name, len(blocks), own, first, last)))

    stages = []
    for i in mine:
        module = part(range(ends[i], ends[i + 1]), i == 0, i == len(counts) - 1)
        stages.append(LocalStage(i, module, tuple(blocks[ends[i] : ends[i + 1]]), i == 0, i == len(counts) - 1))
    holder = part([block for i in mine for block in range(ends[i], ends[i + 1])], has_first, has_last)
    return StageSplit(
        model=holder if len(stages) > 1 else stages[0].module,
        stages=tuple(stages),
        count=len(counts),
        borrowed={there: here for here, there in ties} if has_last else None,
        lent=tuple(here for here, _ in ties) if has_first else (),
    )


def _elsewhere(
    model: nn.Module, layout: ModelLayout, name: str, count: int, own: Sequence[int], first: bool, last: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Stand-ins for the modules that a stage does not have."""
    for block in set(range(count)) - set(own):
        yield f"{name}.{block}", PassThrough()
    if not first and not (last and _lends(model)):
        yield from ((module, PassThrough()) for module in named(model, layout.first))
    if not last:
        yield from ((module, PassThrough()) for module in named(model, layout.last))


def _lends(model: nn.Module) -> bool:
    """Whether the head is the embedding's table, and not a module that has it too."""
    return isinstance(model, Decoder) and model.head is None


def _with(module: nn.Module, others: Mapping[str, nn.Module], prefix: str = "") -> nn.Module:
    """A module with some of its parts replaced; only what contains them is copied, and parameters never are."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if path in others:
            made._modules[name] = others[path]
        elif child is not None and any(other.startswith(f"{path}.") for other in others):
            made._modules[name] = _with(child, others, f"{path}.")
    return made


def _ties(model: nn.Module, layout: ModelLayout) -> list[tuple[str, str]]:
    """Parameters that the first and the last stage share: their names in the first and in the last."""
    if _lends(model):
        return [("embed.weight", "embed.weight")]
    names = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    sides = (named(model, layout.first), named(model, layout.last))
    found = []
    for shared in names.values():
        inside = [[name for name in shared if any(name.startswith(f"{m}.") for m in side)] for side in sides]
        if inside[0] and inside[1]:
            found.append((inside[0][0], inside[1][0]))
    return found


def has_ties(model: nn.Module, layout: ModelLayout) -> bool:
    """Whether the first and the last stage of a model share a parameter."""
    return bool(_ties(model, layout))


def tie_group(world: World) -> dist.ProcessGroup | None:
    """The first and the last stage's workers of one pipeline, who share what is tied; all workers must call this."""
    assert world.mesh is not None, "a pipeline has a mesh"
    names = world.mesh.mesh_dim_names or ()
    columns = world.mesh.mesh.movedim(names.index("pipeline"), 0).reshape(world.axis("pipeline").size, -1)
    mine = None
    for first, last in zip(columns[0].tolist(), columns[-1].tolist(), strict=True):
        group = dist.new_group([first, last])
        if world.rank in (first, last):
            mine = group
    return mine


# -- the schedule


class PipelineRunner:
    """Runs a step's microbatches through all stages, in the order of a schedule."""

    def __init__(
        self,
        stages: StageSplit,
        world: World,
        parallel: Parallel,
        shape: torch.Size,
        dtype: torch.dtype,
        divides: bool = False,
    ) -> None:
        """`shape` is that of one microbatch's stream between stages; its first dim is the rows of a microbatch.

        `divides` is a mistake on purpose: the loss is a sum over the batch, divided once, and would be so twice.
        """
        self._stages, self._world, self._parallel, self._divides = stages, world, parallel, divides
        self._shape, self._dtype = shape, dtype
        self._made = dict[int, Any]()
        self._scale = 1.0

    def step(self, inputs: Tensor, labels: Tensor, scale: float, documents: Tensor | None = None) -> Tensor:
        """Forward and backward of all rows; the summed loss times `scale`, where the last stage is here."""
        return self._run("step", inputs, labels, scale, documents)

    def evaluate(self, inputs: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """The summed loss of all rows, where the last stage is here."""
        return self._run("eval", inputs, labels, 1.0, documents)

    def _run(self, call: str, inputs: Tensor, labels: Tensor, scale: float, documents: Tensor | None) -> Tensor:
        schedule = self._schedule(len(inputs) // self._shape[0])
        self._scale = scale
        losses = list[Tensor]()
        first = any(stage.first for stage in self._stages.stages)
        last = any(stage.last for stage in self._stages.stages)
        arguments = {"target": labels, "losses": losses} if last else {}
        told = {"labels": labels} | ({} if documents is None else {"documents": documents})
        getattr(schedule, call)(*([inputs] if first else []), **told, return_outputs=False, **arguments)
        total = torch.zeros((), device=self._world.device)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else total

    def _schedule(self, microbatches: int) -> Any:
        if microbatches not in self._made:
            self._made[microbatches] = self._make(microbatches)
        return self._made[microbatches]

    def _make(self, microbatches: int) -> Any:
        made = [self._stage(stage) for stage in self._stages.stages]
        options = {
            "n_microbatches": microbatches,
            "loss_fn": lambda loss, _: loss * self._scale,
            "scale_grads": self._divides,
        }
        if self._parallel.schedule == "1f1b":
            return Schedule1F1B(made[0], **options)
        kind = ScheduleInterleaved1F1B if self._parallel.schedule == "interleaved" else ScheduleInterleavedZeroBubble
        return kind(made, **options)

    def _stage(self, stage: LocalStage) -> PipelineStage:
        stream = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty(self._shape[:2], dtype=torch.int64, device="meta")
        return PipelineStage(
            stage.module,
            stage.index,
            self._stages.count,
            self._world.device,
            input_args=tokens if stage.first else stream,
            output_args=torch.empty((), device="meta", requires_grad=True) if stage.last else stream,
            group=self._world.axis("pipeline").group,
        )
