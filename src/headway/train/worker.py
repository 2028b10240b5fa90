"""A worker process: joins the others, builds the parts, trains, and reports how it ended."""

import contextlib
import os
import traceback
from pathlib import Path

import torch

from headway.errors import HeadwayError, RunError, WorkerError
from headway.parallel import join, leave
from headway.recipe import Assignment, Parallel, Recipe
from headway.state import Channel, ChannelClosed, Message
from headway.track import Recorder, RunFolder, read_recipe, record_path
from headway.track.access import adopt_umask
from headway.track.heartbeat import HeartbeatPages, HeartbeatWriter
from headway.track.user_log import close_log, open_log
from headway.train import stack_responder as stacks
from headway.train.build import Parts, build
from headway.train.compilation import record_compilation
from headway.train.custom_init import init_custom_model
from headway.train.environment import record_environment, record_facts
from headway.train.fail_together import PeerFailed
from headway.train.loop import train
from headway.train.numerics import NumericsMonitor
from headway.train.parity_trial import trial
from headway.train.restore import open_state
from headway.train.save import SaveClient
from headway.train.stop import StoppedEarly, StopRequest

FINISHED, FAILED, RECORD_LOST, STOPPED = 0, 1, 74, 75


def main(line: Channel) -> int:
    """Wait for an assignment, then run as one rank of an attempt; return the exit status."""
    _be_called("hw-spare")
    message = _wait(line)
    if message is None:
        return FINISHED
    assignment = Assignment.model_validate(message.fields["assignment"])
    adopt_umask(Path(assignment.run))
    _print_into(Path(assignment.log))
    run = RunFolder(Path(assignment.run))
    name = "draw" if assignment.draw else f"rank-{assignment.rank}"
    _be_called(f"hw {run.name[-5:]} {name}")
    stacks.answer_requests(run.stacks, assignment.attempt, assignment.rank)
    try:
        recorder = Recorder(record_path(run.events, assignment.attempt, name), attempt=assignment.attempt, process=name)
    except RunError:
        return RECORD_LOST  # only a status, since a message cannot be recorded either
    recipe = read_recipe(run)
    open_log(run.path, assignment.attempt, name)
    stop = StopRequest()
    stop.listen()
    try:
        recorder.event("begin", at=assignment.asked_ns, name="startup")
        torch.set_num_threads(assignment.threads)
        if assignment.draw:
            init_custom_model(run, recipe, assignment.workers)
            return FINISHED
        return FINISHED if work(assignment, recipe, recorder, stop, line, message) else STOPPED
    except StoppedEarly:
        return STOPPED
    except Exception as error:
        traceback.print_exc()
        reported = explain(error, recipe)
        recorder.event(
            "error", type=type(reported).__name__, message=reported.message, hint=reported.hint,
            place=place_of(error), **reported.facts,
        )  # fmt: skip
        return FAILED
    finally:
        close_log()
        recorder.close()


def work(
    assignment: Assignment, recipe: Recipe, recorder: Recorder, stop: StopRequest, line: Channel, message: Message
) -> bool:
    """Join the others, build the parts, train; return True when all steps are done, False if stopped earlier."""
    pulse, *files = message.descriptors
    beat = HeartbeatWriter(HeartbeatPages(assignment.workers, pulse).page(assignment.rank))
    recorder.on_trouble = beat.unrecorded
    beat.enter("join")
    if assignment.device == "cuda":
        with recorder.span("context"):  # separate, since nothing makes it shorter
            torch.cuda.set_device(assignment.local_rank)
            torch.cuda.synchronize()
    world = join(assignment, recipe.train.timeout_s, (recipe.parallel or Parallel()).sizes(assignment.workers))
    beat.enter("build")
    state = open_state(assignment, files, message.fields)
    parts = build(assignment, recipe, world, recorder, stop, beat, state)
    tell_beginning(parts, assignment)
    saves = SaveClient(line, parts, assignment.attempt) if assignment.trial is None else None
    recorder.event("end-span", name="startup")
    if saves is not None:
        watch = NumericsMonitor(recipe.health, assignment.judge, assignment.accept)
        finished = train(parts, saves, watch, assignment.doubt)
    else:
        assert assignment.trial is not None
        finished = trial(parts, assignment.trial)
    parts.feed.close()
    recorder.event("begin", name="shutdown")  # ends with the process: destroying a GPU context takes time
    leave(world)
    return finished


def _wait(line: Channel) -> Message | None:
    """Return the agent's first message, possibly after a long time as a spare; None if the worker is not needed."""
    try:
        return next(message for message in line.receive(None))
    except ChannelClosed:
        return None


def _print_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _be_called(name: str) -> None:
    """Set the process name shown by ps (Linux; at most 15 characters)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:15])


def place_of(error: BaseException) -> str:
    """Return the innermost location of an error, by which a recurrence is recognized."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def tell_beginning(parts: Parts, assignment: Assignment) -> None:
    """Record the attempt's first step, environment and cost per token."""
    if parts.recipe.compiles(parts.world.device.type):
        record_compilation(parts.recorder, parts.beat)
    record_facts(parts)
    if parts.world.first:
        record_environment(parts, assignment)
        parts.recorder.event("resumed", step=parts.start.step)


def explain(error: Exception, recipe: Recipe) -> HeadwayError:
    """Return an error with one sentence for people, and a hint with the setting to change if there is one."""
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
    """Return which settings can still reduce memory, cheapest first."""
    train = recipe.train
    ways = []
    if train.microbatch != 1:
        ways.append(f"lower train.microbatch (now {train.microbatch or 'the whole share of the batch'})")
    if train.recompute != "full" or train.recompute_blocks is not None:
        ways.append("set train.recompute=full for all blocks")
    if not train.offload_optimizer and torch.cuda.is_available():
        ways.append("set train.offload_optimizer=true")
    return ", or ".join(ways) or "more workers, or a smaller model or sequence"
