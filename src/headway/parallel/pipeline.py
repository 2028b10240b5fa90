"""The pipeline axis: a model's blocks are split into stages, which send the residual stream on.

A stage is the model itself, in which modules of other stages pass their input through: names stay those of the plain
model, and its own `forward` runs unchanged. PyTorch's schedules order microbatches. They get shapes beforehand, so that
only tensors are sent.
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
from headway.parallel.objective import DeviceBatch, MeasureHead, SumScale, loss_of
from headway.parallel.world import Axis, World
from headway.recipe import ModelLayout, Parallel


@dataclass(frozen=True)
class LocalStage:
    """A stage of this worker."""

    index: int
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    first: bool = True
    """Whether it takes tokens."""
    last: bool = True
    """Whether it computes the loss."""


@dataclass(frozen=True)
class StageSplit:
    """This worker's stages of a model."""

    model: nn.Module
    """All of its modules, by the names of the plain model."""
    stages: tuple[LocalStage, ...]
    count: int = 1
    """Number of stages over all workers."""
    borrowed: Mapping[str, str] | None = None
    """Copies of parameters that another stage owns: local name to owner's name."""
    lent: tuple[str, ...] = ()
    """Parameters that another stage has a copy of."""


class PassThrough(nn.Module):
    """Stands in for another stage's module; it may hold that module's weight, for a tied head."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the input."""
        if not x.is_floating_point():
            raise ModelError(
                "a module of the first stage takes more than the stream, which later stages do not have",
                hint="put positions into one module with the token embedding, and name that in model.layout.first",
            )
        return x


def split(model: nn.Module, layout: ModelLayout, counts: Sequence[int], axis: Axis) -> StageSplit:
    """Return this worker's stages of a model on the meta device; stage i, of `counts[i]` blocks, is on rank i %
    ranks."""
    name, blocks = blocks_of(model, layout)
    ends = [0, *accumulate(counts)]
    ties = _ties(model, layout)
    own_stages = [i for i in range(len(counts)) if i % axis.size == axis.rank]
    has_first, has_last = own_stages[0] == 0, own_stages[-1] == len(counts) - 1
    if has_last and _lends(model):
        model = _with(model, {"embed": PassThrough(model.embed.weight)})  # type: ignore[union-attr, arg-type]

    def part(indices: Sequence[int], first: bool, last: bool) -> nn.Module:
        return _with(model, dict(_elsewhere(model, layout, name, len(blocks), indices, first, last)))

    stages = []
    for i in own_stages:
        module = part(range(ends[i], ends[i + 1]), i == 0, i == len(counts) - 1)
        stages.append(LocalStage(i, module, tuple(blocks[ends[i] : ends[i + 1]]), i == 0, i == len(counts) - 1))
    holder = part([block for i in own_stages for block in range(ends[i], ends[i + 1])], has_first, has_last)
    return StageSplit(
        model=holder if len(stages) > 1 else stages[0].module,
        stages=tuple(stages),
        count=len(counts),
        borrowed={remote: local for local, remote in ties} if has_last else None,
        lent=tuple(local for local, _ in ties) if has_first else (),
    )


def _elsewhere(
    model: nn.Module, layout: ModelLayout, name: str, count: int, blocks: Sequence[int], first: bool, last: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield stand-ins for the modules that a stage does not have."""
    for block in set(range(count)) - set(blocks):
        yield f"{name}.{block}", PassThrough()
    if not first and not (last and _lends(model)):
        yield from ((module, PassThrough()) for module in named(model, layout.first))
    if not last:
        yield from ((module, PassThrough()) for module in named(model, layout.last))


def _lends(model: nn.Module) -> bool:
    """Whether the head uses the embedding's weight, without a module of its own."""
    return isinstance(model, Decoder) and model.head is None and model.score is None


def _with(module: nn.Module, others: Mapping[str, nn.Module], prefix: str = "") -> nn.Module:
    """Return a module with some submodules replaced; only their ancestors are copied, parameters never."""
    replaced = copy.copy(module)
    replaced._modules = dict(module._modules)
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if path in others:
            replaced._modules[name] = others[path]
        elif child is not None and any(other.startswith(f"{path}.") for other in others):
            replaced._modules[name] = _with(child, others, f"{path}.")
    return replaced


def _ties(model: nn.Module, layout: ModelLayout) -> list[tuple[str, str]]:
    """Return parameters tied between the first and last stage: their names in both."""
    if _lends(model):
        return [("embed.weight", "embed.weight")]
    names = dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    sides = (named(model, layout.first), named(model, layout.last))
    ties = []
    for shared in names.values():
        inside = [[name for name in shared if any(name.startswith(f"{m}.") for m in side)] for side in sides]
        if inside[0] and inside[1]:
            ties.append((inside[0][0], inside[1][0]))
    return ties


def has_ties(model: nn.Module, layout: ModelLayout) -> bool:
    """Whether the first and last stage share a parameter."""
    return bool(_ties(model, layout))


def tie_group(world: World) -> dist.ProcessGroup | None:
    """Return the group of the first and last stage's workers, who share tied parameters; all workers must call this."""
    assert world.mesh is not None, "a pipeline has a mesh"
    names = world.mesh.mesh_dim_names or ()
    columns = world.mesh.mesh.movedim(names.index("pipeline"), 0).reshape(world.axis("pipeline").size, -1)
    own_group = None
    for first, last in zip(columns[0].tolist(), columns[-1].tolist(), strict=True):
        group = dist.new_group([first, last])
        if world.rank in (first, last):
            own_group = group
    return own_group


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
        head: MeasureHead | None = None,
        divides: bool = False,
    ) -> None:
        """`shape` is that of a microbatch's stream between stages; its first dim is the rows of a microbatch.

        `divides` is a deliberate bug: the loss, a sum over the batch, is divided twice.
        """
        self._stages, self._world, self._parallel, self._divides = stages, world, parallel, divides
        self._shape, self._dtype, self._head = shape, dtype, head
        self._schedules = dict[int, Any]()
        self._scale: SumScale | None = None
        self._values = list[Tensor]()

    def step(self, batch: DeviceBatch, scale: SumScale) -> Tensor:
        """Run forward and backward of all rows; return the scaled sums, on the last stage."""
        return self._run("step", batch, scale)

    def evaluate(self, batch: DeviceBatch) -> Tensor:
        """Return the sums of all rows, on the last stage."""
        return self._run("eval", batch, None)

    def _run(self, call: str, batch: DeviceBatch, scale: SumScale | None) -> Tensor:
        schedule = self._schedule(len(batch.inputs) // self._shape[0])
        self._scale, self._values = scale, []
        first = any(stage.first for stage in self._stages.stages)
        last = any(stage.last for stage in self._stages.stages)
        arguments: dict[str, Any] = {"target": batch.labels, "losses": []} if last else {}
        extra = {"labels": batch.labels, **batch.columns}
        extra |= {} if batch.documents is None else {"documents": batch.documents}
        getattr(schedule, call)(*([batch.inputs] if first else []), **extra, return_outputs=False, **arguments)
        if self._values:
            return torch.stack(self._values).sum(dim=0)
        return torch.zeros(self._out_shape, device=self._world.device)

    def _loss(self, sums: Tensor, _: Tensor) -> Tensor:
        """The loss of a microbatch; its scaled sums are kept."""
        values = sums if self._scale is None else self._scale.of(sums)
        self._values.append(values.detach())
        return loss_of(values, 1 if self._head is None else self._head.objective.terms)

    @property
    def _out_shape(self) -> tuple[int, ...]:
        return () if self._head is None else (len(self._head.objective.names),)

    def _schedule(self, microbatches: int) -> Any:
        if microbatches not in self._schedules:
            self._schedules[microbatches] = self._make(microbatches)
        return self._schedules[microbatches]

    def _make(self, microbatches: int) -> Any:
        stages = [self._stage(stage) for stage in self._stages.stages]
        options = {
            "n_microbatches": microbatches,
            "loss_fn": self._loss,
            "scale_grads": self._divides,
        }
        if self._parallel.schedule == "1f1b":
            return Schedule1F1B(stages[0], **options)
        kind = ScheduleInterleaved1F1B if self._parallel.schedule == "interleaved" else ScheduleInterleavedZeroBubble
        return kind(stages, **options)

    def _stage(self, stage: LocalStage) -> PipelineStage:
        stream = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty(self._shape[:2], dtype=torch.int64, device="meta")
        return PipelineStage(
            stage.module,
            stage.index,
            self._stages.count,
            self._world.device,
            input_args=tokens if stage.first else stream,
            output_args=torch.empty(self._out_shape, device="meta", requires_grad=True) if stage.last else stream,
            group=self._world.axis("pipeline").group,
        )
