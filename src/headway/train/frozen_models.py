"""What frozen models say of the data: a teacher's likeliest tokens, and log-probabilities of the initial weights.

Either is computed once, before the first step, and read as columns of the rows; or with each batch, by a teacher beside
the model. `train/objectives/teacher.py` and `train/objectives/reference.py` compute them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from headway.data.corpus import Corpus
from headway.data.loader import RowReader
from headway.data.media.corpus import MediaCorpus
from headway.parallel import ParallelModel, World
from headway.parallel.objective import Objective
from headway.recipe import Recipe
from headway.recipe.objective import Distill
from headway.recipe.policy import PolicyGradient
from headway.track import Recorder, RunFolder
from headway.track.heartbeat import HeartbeatWriter
from headway.train.draw_weights import draw_weights
from headway.train.objectives import CountedObjective
from headway.train.objectives.preference import REFERENCE
from headway.train.objectives.reference import ScoringProgress, WithReference, reference_column
from headway.train.objectives.teacher import (
    WithTeacher,
    frozen_model,
    load_teacher,
    recipe_of_reference,
    stored_targets,
)
from headway.train.stop import StopRequest


@dataclass(frozen=True)
class WorkerContext:
    """What the parts of one worker are built with."""

    recipe: Recipe
    run: RunFolder
    world: World
    recorder: Recorder
    beat: HeartbeatWriter
    stop: StopRequest


def with_frozen_models(
    context: WorkerContext,
    objective: CountedObjective,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
    draw: Callable[[], None] | None,
) -> tuple[ParallelModel, RowReader | None]:
    """Return the model and the reader of rows, with the columns of frozen models that the objective needs.

    `draw` sets the initial weights; None if the model has them.
    """
    wanted = context.recipe.objective
    if isinstance(wanted, Distill):
        spread, reader = _with_teacher(context, wanted, spread, corpus, reader)
    if REFERENCE in objective.columns:
        reader = _with_reference(context, spread, corpus, reader, draw)
    return spread, reader


def reference_beside(context: WorkerContext, objective: CountedObjective) -> ParallelModel | None:
    """Return the initial model that a policy is kept near to, if its objective has a KL term."""
    recipe = context.recipe
    assert isinstance(recipe.objective, PolicyGradient)
    if recipe.objective.kl == "none":
        return None
    draw = partial(draw_weights, run=context.run)
    return frozen_model(recipe_of_reference(recipe), context.world, draw, cast(Objective, objective))


def _with_teacher(
    context: WorkerContext,
    objective: Distill,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
) -> tuple[ParallelModel, RowReader | None]:
    """Return the model with its teacher beside it, or the reader of rows with what the teacher stored of them."""
    recipe, world, run = context.recipe, context.world, context.run
    load = partial(load_teacher, recipe, objective, world, partial(draw_weights, run=run))
    if objective.mode == "live":
        return replace(spread, teach=load().teach), reader
    assert isinstance(corpus, Corpus), "a teacher has tokens"
    assert reader is not None
    with _scoring(context, "teacher") as mark:
        stored = stored_targets(recipe, objective, corpus, world, mark, load, run.name)
    return spread, WithTeacher(reader, stored)


def _with_reference(
    context: WorkerContext,
    spread: ParallelModel,
    corpus: Corpus | MediaCorpus,
    reader: RowReader | None,
    draw: Callable[[], None] | None,
) -> RowReader:
    """Return the reader of rows with the log-probabilities of the initial weights, which `draw` sets."""
    assert isinstance(corpus, Corpus)
    assert reader is not None
    with _scoring(context, "reference") as mark:
        return WithReference(reader, reference_column(context.recipe, corpus, spread, context.world, mark, draw))


@contextmanager
def _scoring(context: WorkerContext, of: str) -> Iterator[Callable[[int, int, int], None]]:
    """Account for what a frozen model scores as evaluation; yield what marks its progress."""
    context.beat.enter("evaluate")
    with context.recorder.span("evaluation"):
        yield ScoringProgress(context.world, context.recorder, context.beat, context.stop, of).mark
