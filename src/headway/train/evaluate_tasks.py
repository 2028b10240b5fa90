"""Tasks during training: every worker answers its share of the questions with the weights of this step."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.errors import HeadwayError
from headway.evals.session import EvalOptions, EvalSession, OpenTask, open_tasks
from headway.inference.evaluate import EvaluateRequest, answer_all
from headway.inference.llm import LLM
from headway.inference.load import LoadedModel, live_run
from headway.inference.text_engine import EngineOptions
from headway.models.lora import add_adapters
from headway.parallel import World
from headway.parallel.whole import fill_whole
from headway.recipe import Eval
from headway.track import write_evaluation
from headway.train.build import Parts, empty_model
from headway.train.fail_together import PeerFailed, fail_together
from headway.train.optim import lower

MEMORY_SHARE = 0.5
"""Of the memory that training leaves free, for the KV cache."""


def tasks_of(settings: Eval) -> tuple[OpenTask, ...]:
    """Return the tasks of a recipe with their questions."""
    data = None if settings.tasks_data is None else Path(settings.tasks_data)
    return tuple(open_tasks(settings.tasks, EvalOptions(limit=settings.tasks_limit), data=data))


def evaluate_tasks(parts: Parts, tasks: Sequence[OpenTask], step: int) -> None:
    """Answer and score the questions of tasks, and record them in the run, as `headway eval RUN@STEP` does.

    Tasks that cannot be evaluated are reported and do not end the run.
    """
    run, world = parts.run, parts.world
    options = EvalOptions(limit=parts.recipe.eval.tasks_limit)
    session = EvalSession(
        {"run": str(run.path)}, f"{run.name}@{step}", [replace(task, rows={}) for task in tasks], options
    )
    with parts.recorder.span("evaluation"):
        parts.faults.reach("evaluation", step)
        started = time.time()
        try:
            with fail_together(world, "evaluate the tasks"):
                answers = _answers(parts, session)
        except HeadwayError as error:
            if not isinstance(error, PeerFailed):
                parts.recorder.event("log", message=f"step {step}: no evaluation of the tasks: {error.message}")
            return
        for answer in _gathered(answers, world):
            session.take(answer)
        session.finish(started, time.time())
    if world.first:
        evaluations = session.evaluations()
        for evaluation, rows in zip(evaluations, session.rows(), strict=True):
            write_evaluation(run, evaluation, rows)
        scores = {f"{task.task}/{metric.name}": metric.value for task in evaluations for metric in task.metrics}
        parts.callbacks.evaluated(step, scores)


def _answers(parts: Parts, session: EvalSession) -> list[dict[str, Any]]:
    """Return this worker's answers: to every n-th question of each task."""
    world, answers = parts.world, list[dict[str, Any]]()
    request = EvaluateRequest.model_validate(session.request())
    share = slice(world.rank, None, world.size)
    some = [task.model_copy(update={"questions": task.questions[share]}) for task in request.tasks]
    options = EngineOptions(memory_share=MEMORY_SHARE, graphs=False, exact=parts.recipe.inference.exact)
    llm = LLM(_live(parts), options=options, on_step=parts.beat.mark)
    answer_all(llm, request.model_copy(update={"tasks": some}), answers.append)
    del llm
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers


def _live(parts: Parts) -> LoadedModel:
    """Return the model as it is at this step, whole on this worker, as `headway eval` would load it."""
    recipe, world = parts.recipe, parts.world
    plain = empty_model(recipe.model)
    lower(plain, recipe.train)
    if recipe.lora is not None:
        add_adapters(plain, recipe.lora)
    dtype = torch.bfloat16 if world.device.type == "cuda" and recipe.train.dtype == "bfloat16" else torch.float32
    fill_whole(plain, parts.spread, world, dtype)
    return live_run(plain.eval(), recipe, parts.run, world.device)


def _gathered(answers: list[dict[str, Any]], world: World) -> list[dict[str, Any]]:
    """Return the answers of all workers."""
    content = torch.frombuffer(bytearray(json.dumps(answers).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in world.gather(torch.tensor([len(content)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(content)] = content
    parts = [bytes(part[:size].numpy()) for part, size in zip(world.gather(padded), sizes, strict=True)]
    return [answer for part in parts for answer in json.loads(part)]
