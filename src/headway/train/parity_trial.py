"""A parity trial: a few steps whose numbers are all written out, for comparison with another mesh.

    <folder>/
      gradients/step-<n>/    of each step                            as gradient/<parameter>
      parameters/step-<n>/   after its update by plain descent       as model/<parameter>
      adamw/step-<n>/        after one AdamW update with the last gradients
      marks-<rank>.json      sums over what modules put out in the first step
      trial.json             the loss of each step, and the parameters in the model's order

Tensors are written like checkpoints: each worker writes its part. The updates are plain gradient descent, because AdamW
turns the rounding noise of a near-zero gradient into a full step.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headway.parallel import finish_gradients
from headway.parallel.layout import blocks_of, layout_of
from headway.parallel.pipeline import PassThrough
from headway.recipe import ModelLayout, ParityTrial, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.state import (
    CheckpointFacts,
    PartialCheckpoint,
    begin_checkpoint,
    collect_shard_entries,
    commit,
    leave_shard_entry,
    partial_folder,
    shard_name,
    write_shard,
)
from headway.state.tensors import fill, named_state, pieces
from headway.track import chain
from headway.train.build import Parts
from headway.train.fail_together import fail_together
from headway.train.loop import global_counts, reported

ZEROS_STD = 0.02
ModulePosition = tuple[int, int]
"""Position of a module in the plain model: before (0), among (1) or after (2) its blocks, and its index there."""


def trial(parts: Parts, spec: ParityTrial) -> bool:
    """Run a trial and write its numbers; return False if stopped early."""
    folder, model, world = Path(spec.folder), parts.spread.model, parts.world
    if isinstance(parts.recipe.model, DiffusionModel):
        draw_zeros(model, parts.recipe)
    losses = list[float]()
    cursor = 0
    marks = ActivationSums(model, layout_of(model, parts.recipe.model.layout))
    for step in range(1, spec.steps + 1):
        if world.any(parts.stop.asked):
            return False
        parts.faults.reach("start", step)
        losses.append(descend(parts, cursor))
        cursor += parts.recipe.train.batch
        if step == 1:
            marks.remove()
            marks.write(folder / f"marks-{world.rank}.json")
        write(parts, folder / "gradients", step, gradients(parts))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-parts.recipe.train.lr)
        write(parts, folder / "parameters", step, named_state(model, share=parts.held))
        if step < spec.steps:
            parts.optimizer.zero_grad(set_to_none=True)

    parts.optimizer.step()
    write(parts, folder / "adamw", spec.steps, named_state(model, share=parts.held))
    if world.first:
        order = [name for name, _ in model.named_parameters()]
        (folder / "trial.json").write_text(json.dumps({"losses": losses, "order": order}))
    return True


@torch.no_grad()
def draw_zeros(model: nn.Module, recipe: Recipe) -> None:
    """Draw the weights that start at zero: as gates and head of a diffusion transformer do, so that no gradient would
    reach the matrices before them in a few steps."""
    for name, parameter in model.named_parameters():
        if recipe.model.initial(name) == (0.0, 0.0) and parameter.ndim > 1:
            key = hashlib.sha256(f"trial/{recipe.seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            fill(name, parameter, torch.empty(parameter.shape).normal_(0.0, ZEROS_STD, generator=generator))


def descend(parts: Parts, cursor: int) -> float:
    """Run forward and backward over one batch, as in `loop.train`; return the loss over all workers."""
    world, spread, recipe = parts.world, parts.spread, parts.recipe
    rows, *counted = parts.feed.read(cursor)
    values = spread.passes(rows, global_counts(parts, recipe.train.batch, *counted).scale)
    finish_gradients(dict(spread.model.named_parameters()), spread.missing)
    return float(world.sum(reported(parts, values)[0]))


def gradients(parts: Parts) -> dict[str, Tensor]:
    """Return this worker's gradients, by the owner's parameter names."""
    borrowed = parts.held.borrowed
    named = ((name, parameter.grad) for name, parameter in parts.spread.model.named_parameters())
    return {f"gradient/{borrowed.get(name, name)}": gradient for name, gradient in named if gradient is not None}


def write(parts: Parts, folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors together with the other workers."""
    world = parts.world
    local_pieces = pieces(tensors, parts.held)
    save: PartialCheckpoint | None = None
    with fail_together(world, "prepare a trial's files"):
        if world.first:
            save = begin_checkpoint(
                folder, step, needs_bytes=world.size * sum(piece.data.nbytes for piece in local_pieces)
            )
    partial = partial_folder(folder, step)
    with fail_together(world, "write its part of a trial"):
        leave_shard_entry(partial, write_shard(partial, shard_name(world.rank), local_pieces))
    with fail_together(world, "commit a trial's files"):
        if save is not None:
            facts = CheckpointFacts(
                cursor=step * parts.recipe.train.batch, chain=chain.START, data_version=parts.data_version
            )
            commit(save, facts, collect_shard_entries(partial, world.size), workers=world.size)


# -- module outputs


class ActivationSums:
    """Sums over the outputs of blocks and of the modules before and after them, while its hooks are installed.

    Sums over all workers equal those of one process, however rows, sequences or the vocabulary are split; replicated
    outputs count several times, and the number of elements tells how often.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self._sums = dict[str, Tensor]()
        self._positions = {name: position for position, name, _ in module_positions(model, layout)}
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name)) for _, name, module in module_positions(model, layout)
        ]

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.is_floating_point():
                x = out.detach().double()
                sums = torch.stack((x.sum(), x.square().sum(), x.new_tensor(float(x.numel()))))
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums

        return add

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def write(self, file: Path) -> None:
        """Write a list of position, name, sum, sum of squares and number of elements."""
        keys = ("sum", "squares", "count")
        rows: list[dict[str, Any]] = [
            {"place": self._positions[name], "name": name, **dict(zip(keys, sums.tolist(), strict=True))}
            for name, sums in self._sums.items()
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows))


def module_positions(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[ModulePosition, str, nn.Module]]:
    """Yield the observed modules of this worker, with their positions in the plain model."""
    modules = dict(model.named_modules())
    container, _ = blocks_of(model, layout)
    first, last = layout.first, layout.last
    if not first and not last:
        # No layout names the modules around the blocks: take the model's children in their order.
        children = tuple(name for name, _ in model.named_children())
        middle = next((i for i, name in enumerate(children) if f"{container}.".startswith(f"{name}.")), len(children))
        first, last = children[:middle], children[middle + 1 :]
    blocks = tuple(f"{container}.{name}" for name, _ in modules[container].named_children()) if container else ()
    for side, names in enumerate((first, blocks, last)):
        for i, name in enumerate(names):
            if name in modules and not isinstance(modules[name], PassThrough):
                yield (side, i), name, modules[name]
