"""`python -m headway.train.rl_replay`: the process behind `headway rl mismatch` and `headway rl replay`.

Reads one request, a JSON object, from stdin. Builds the trainer's model with the weights that sampled a batch of
rollouts, in one process whatever the run's mesh was, and writes JSON lines to stdout: {"ready"} with what bits depend
on; then per answer {"sample", "answer", "logprobs"} by the trainer, or {"rollout"} as the sampler repeats it; on an
error a last {"error", "hint"} and the error's exit status.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from headway.data.corpus import open_corpus
from headway.errors import HeadwayError, RunError
from headway.kernels.dispatch import make_plain
from headway.models.custom import empty_model
from headway.models.exact import make_exact
from headway.models.lora import add_adapters, base_names
from headway.parallel import ParallelModel, World, parallelize_model
from headway.parallel.objective import DeviceBatch, Objective
from headway.recipe import Recipe
from headway.rl.groups import Group, chosen, groups_of, shares
from headway.rl.packing import pack_answers
from headway.rl.rollout_files import RolloutFiles
from headway.state import open_checkpoint
from headway.state.parent_process import end_with_parent
from headway.state.tensors import ModelShare, load_weights
from headway.track import RunFolder, read_recipe
from headway.train.answers import AnswerRequest, live_sampler
from headway.train.draw_weights import draw_weights
from headway.train.environment import device_name
from headway.train.objectives import make_objective
from headway.train.optim import lower

Say = Callable[[dict[str, Any]], None]


class ReplayRequest(BaseModel):
    """A batch of rollouts, and what to compute of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["mismatch", "replay"]
    run: Path
    step: int
    """The first step that learns from the batch."""
    checkpoint: Path | None
    """Of the weights that sampled it; None for those that the run began with."""
    version: int = 0
    """Step of those weights."""
    threads: int | None = None
    """Compute threads, as the run had."""
    shares: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Samples with their prompts, by the worker that sampled answers to them; for a replay."""


def answer(request: ReplayRequest, say: Say) -> None:
    """Do what a request asks for."""
    run = RunFolder(request.run)
    recipe = read_recipe(run).model_copy(update={"parallel": None})
    assert recipe.rl is not None, "the command line has checked it"
    world = World(rank=0, size=1, device=_device(recipe))
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    make_plain(recipe.train.plain)
    spread = policy_at(recipe, run, request.checkpoint, world)
    say({"ready": conditions(world)})
    if request.kind == "mismatch":
        for line in trainer_logprobs(recipe, run, request.step, spread, world):
            say(line)
    else:
        replay(recipe, run, request, spread, world, say)


def _device(recipe: Recipe) -> torch.device:
    if recipe.train.device == "cuda" and not torch.cuda.is_available():
        raise RunError("the run trained on a GPU, and there is none here", hint="replay it on a machine with one")
    return torch.device("cuda" if recipe.train.device != "cpu" and torch.cuda.is_available() else "cpu")


def conditions(world: World) -> dict[str, Any]:
    """Return what bits depend on here, as environment.json of a run names it."""
    return {
        "workers": world.size,
        "device": device_name(world.device),
        "threads": torch.get_num_threads(),
        "packages": {name: metadata.version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
    }


@torch.no_grad()
def policy_at(recipe: Recipe, run: RunFolder, checkpoint: Path | None, world: World) -> ParallelModel:
    """Return the trainer's model with the weights of a checkpoint, or without one those that the run began with."""
    assert recipe.rl is not None
    model, base = empty_model(recipe.model), frozenset[str]()
    lower(model, recipe.train)
    if recipe.lora is not None:
        add_adapters(model, recipe.lora)
        base = base_names(model)
    model.requires_grad_(False)
    if recipe.inference.exact:
        make_exact(model, world.device, getattr(torch, recipe.train.dtype))
    objective = cast(Objective, make_objective(recipe.objective, False, recipe.rl))
    spread = parallelize_model(model, recipe, world, objective=objective)
    held = ModelShare(world.rank, world.stage, spread.borrowed, spread.names, base)
    for buffer in spread.model.buffers():
        buffer.zero_()  # it was uninitialized memory
    if checkpoint is None or base:  # a checkpoint of a run with adapters has only those
        draw_weights(spread.model, recipe, held, run)
    if checkpoint is not None:
        load_weights(open_checkpoint(checkpoint), spread.model, held)
    spread.model.eval()
    return spread


# -- mismatch


def trainer_logprobs(
    recipe: Recipe, run: RunFolder, step: int, spread: ParallelModel, world: World
) -> Iterator[dict[str, Any]]:
    """Yield the trainer's log-probabilities of answers that a batch's steps learn from, packed as those pack them."""
    assert recipe.rl is not None
    batch = RolloutFiles(run).read(step)
    assert batch is not None, "the command line has read it"
    groups = chosen(groups_of(batch.rollouts, recipe.rl), recipe.rl, recipe.train.batch * recipe.rl.updates)
    for part in shares(groups, recipe.rl.updates):
        yield from _part_logprobs(part, recipe.data.seq, spread, world)


def _part_logprobs(part: Sequence[Group], seq: int, spread: ParallelModel, world: World) -> Iterator[dict[str, Any]]:
    rollouts = [rollout for group in part for rollout in group.rollouts]
    packed = pack_answers(rollouts, seq, spread.rows_multiple)
    assert packed.batch.documents is not None
    arrays = packed.batch.inputs, packed.batch.labels, packed.batch.documents
    inputs, labels, documents = (torch.from_numpy(np.ascontiguousarray(array)).to(world.device) for array in arrays)
    values_BL = spread.token_logprobs(DeviceBatch(inputs, labels, documents, {}))
    assert values_BL is not None, "there is no pipeline"
    values = values_BL.float().cpu().numpy()
    for rollout, span in zip(rollouts, packed.spans, strict=True):
        yield {"sample": rollout.sample, "answer": rollout.answer, "logprobs": values[span].tolist()}


# -- replay


def replay(
    recipe: Recipe, run: RunFolder, request: ReplayRequest, spread: ParallelModel, world: World, say: Say
) -> None:
    """Sample the answers again as each worker did; nothing is scored."""
    assert recipe.rl is not None
    prompts = open_corpus(recipe).prompt_reader()
    sampler = live_sampler(recipe, run, spread, world)
    sampler.take_weights(request.version)
    for pairs in request.shares:
        requests = [
            AnswerRequest(prompts.prompt(number), sample, place)
            for sample, number in pairs
            for place in range(recipe.rl.samples)
        ]
        sampler.sample(requests, lambda rollout: say({"rollout": asdict(rollout)}), lambda: None)
    sampler.close()


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    try:
        answer(ReplayRequest.model_validate_json(sys.stdin.buffer.read()), _say)
    except HeadwayError as error:
        _say({"error": error.message, "hint": error.hint})
        return error.exit_status
    return 0


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM, *map(int, sys.argv[1:]))
    sys.exit(main())
