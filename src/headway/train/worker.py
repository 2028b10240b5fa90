"""One worker process: joins the others, builds the parts, trains, and tells how it ended."""

import traceback
from pathlib import Path

import torch

from headway.errors import HeadwayError, RunError, WorkerError
from headway.parallel import join, leave
from headway.recipe import Assignment, Parallel, Recipe
from headway.state import Line
from headway.track import Recorder, RunFolder, read_recipe, record_path
from headway.train.build import Parts, RecordLost, build
from headway.train.compilation import record_compilation
from headway.train.draw import draw
from headway.train.environment import record_environment, record_facts
from headway.train.loop import train
from headway.train.save import Saves
from headway.train.stop import StopRequest
from headway.train.together import PeerFailed
from headway.train.trial import trial

__all__ = ["main"]

FINISHED, FAILED, RECORD_LOST, STOPPED = 0, 1, 74, 75


def main(assignment: Assignment, line: Line | None = None) -> int:
    """Work as one rank of an attempt, or make the first weights for all; returns the exit status."""
    run = RunFolder(Path(assignment.run))
    name = "draw" if assignment.draw else f"rank-{assignment.rank}"
    number = assignment.attempt
    try:
        recorder = Recorder(record_path(run.events, number, name), attempt=number, process=name)
    except RunError:
        return RECORD_LOST
    recipe = read_recipe(run)
    stop = StopRequest()
    stop.listen()
    try:
        recorder.event("begin", at=assignment.asked_ns, name="startup")
        torch.set_num_threads(assignment.threads)
        if assignment.draw:
            draw(run, recipe, assignment.workers)
            return FINISHED
        assert line is not None, "a worker that trains has a line to its agent"
        world = join(assignment, recipe.train.timeout_s, (recipe.parallel or Parallel()).sizes(assignment.workers))
        parts = build(assignment, recipe, world, recorder, stop, line)
        tell_beginning(parts, assignment)
        recorder.event("end-span", name="startup")
        finished = train(parts, Saves(line, parts)) if assignment.trial is None else trial(parts, assignment.trial)
        recorder.event("begin", name="shutdown")  # it ends when the process has: a GPU's context takes its time
        leave(world)
        return FINISHED if finished else STOPPED
    except RecordLost:
        return RECORD_LOST  # a status, since words could not be written either
    except Exception as error:
        traceback.print_exc()
        told = explain(error, recipe)
        recorder.event("error", type=type(told).__name__, message=told.message, hint=told.hint)
        return FAILED
    finally:
        recorder.close()


def tell_beginning(parts: Parts, assignment: Assignment) -> None:
    """Record where this attempt starts, on what, and what a token costs."""
    if parts.recipe.train.compile:
        record_compilation(parts.recorder)
    record_facts(parts)
    if parts.world.first:
        record_environment(parts, assignment)
        parts.recorder.event("resumed", step=parts.start.step)


def explain(error: Exception, recipe: Recipe) -> HeadwayError:
    """One sentence for people, with the setting to change where there is one."""
    if isinstance(error, HeadwayError):
        return error
    if isinstance(error.__cause__, HeadwayError):  # a pipeline's schedule wraps what its stages raise
        return error.__cause__
    text = str(error)
    if isinstance(error, torch.distributed.DistError) or "gloo/transport" in text:
        return PeerFailed("lost the connection to another worker")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return WorkerError("out of memory", hint=_less_memory(recipe))
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return WorkerError(f"{type(error).__name__}: {first_line}")


def _less_memory(recipe: Recipe) -> str:
    """What of a recipe can still be changed to need less memory, the cheapest first."""
    train = recipe.train
    ways = []
    if train.microbatch != 1:
        ways.append(f"lower train.microbatch (now {train.microbatch or 'the whole share of the batch'})")
    if train.recompute != "full" or train.recompute_blocks is not None:
        ways.append("set train.recompute=full for all blocks")
    if not train.offload_optimizer and torch.cuda.is_available():
        ways.append("set train.offload_optimizer=true")
    return ", or ".join(ways) or "more workers, or a smaller model or sequence"
