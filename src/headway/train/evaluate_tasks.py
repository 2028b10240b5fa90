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
from headway.inference.text_engine import EngineOptions
from headway.recipe import Eval
from headway.track import write_evaluation
from headway.train.build import Parts
from headway.train.fail_together import PeerFailed, fail_together
from headway.train.live_model import live_model

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
                parts.beat.enter("scores")  # ahead of those with more questions, for which it waits
        except HeadwayError as error:
            if not isinstance(error, PeerFailed):
                parts.recorder.event("log", message=f"step {step}: no evaluation of the tasks: {error.message}")
            return
        for answer in (answer for text in world.gather_text(json.dumps(answers)) for answer in json.loads(text)):
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
    llm = LLM(live_model(parts.recipe, parts.run, parts.spread, world), options=options, on_step=parts.beat.mark)
    answer_all(llm, request.model_copy(update={"tasks": some}), answers.append)
    del llm
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return answers
