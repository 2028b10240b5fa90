"""The whole training step, top to bottom: batch, forward, backward, clip, step, record.

The loss of a step is the sum over the unmasked tokens of the global batch divided by their count: every worker divides
its own sums by that same count, and gradients are summed, so that no split into microbatches or workers changes the
result. The host never waits for the device to read a loss: results return through the meter, and only then extend the
chain and the record. A step is saved only after the numbers of every step up to it have returned and are fine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headway.data.order import after_skips
from headway.models.experts import update_balance
from headway.models.transfer import on_device
from headway.parallel import finish_gradients, total_norm
from headway.parallel.objective import SumScale, loss_of
from headway.recipe.assignment import SuspectElement
from headway.rl.advantages import effective_sample_share
from headway.state.tiers import tiers_at, tiers_at_end
from headway.track import chain, user_log
from headway.train.build import Parts, RunProgress
from headway.train.cuda_graphs import passes_of
from headway.train.evaluate import evaluate
from headway.train.evaluate_tasks import evaluate_tasks, tasks_of
from headway.train.fp8_monitor import is_due as fp8_is_due
from headway.train.fp8_monitor import record_observed
from headway.train.meter import MeasuredStep
from headway.train.numerics import BadNumbers, NumericsMonitor
from headway.train.objectives import NextToken
from headway.train.optim import clip, set_step
from headway.train.optimizer_in_backward import early_updates
from headway.train.replica_check import Corrupted, ReplicaChecker
from headway.train.rng import seed_step
from headway.train.save import SaveClient
from headway.train.schedule import learning_rate


def train(
    parts: Parts, saves: SaveClient, watch: NumericsMonitor | None = None, doubt: SuspectElement | None = None
) -> bool:
    """Train from the restored step; return True when all steps are done, False if stopped earlier.

    `watch` checks the numbers of every step; the element in `doubt` is recorded at its step.
    """
    recipe, world, spread, optimizer, meter = parts.recipe, parts.world, parts.spread, parts.optimizer, parts.meter
    beat, passes = parts.beat, passes_of(spread, recipe, world)
    parameters = dict(spread.model.named_parameters())
    early = early_updates(spread, optimizer, recipe, world)
    recorded, wanted = parts.start, StepRequests()
    step, cursor, durable = recorded.step, recorded.cursor, recorded.step
    watch = watch or NumericsMonitor(recipe.health)
    every, copies = recipe.health.compare_every_steps, world.axis("replicate").size
    replicas = ReplicaChecker(parameters, world, every, step, doubt) if every and copies > 1 else None
    tasks = tasks_of(recipe.eval)
    parts.callbacks.begin(parts.run.path, recipe, step)
    parts.faults.reach("restore", step + 1)

    while step < recipe.train.steps and not wanted.stop:
        step += 1
        beat.step(step)
        user_log.set_step(step)
        parts.faults.reach("start", step)

        # the batch: this worker's rows of the samples at the cursor, or of answers that the model samples now
        if parts.feed.samples(step):
            recorded, wanted = record_all(parts, watch, recorded, meter.drain(), wanted)
        meter.begin()
        parts.faults.reach("data", step)
        batch = recipe.train.batch_at(step)
        first = after_skips(cursor, batch, recipe.data.skip)
        fed = parts.feed.take(step, first, batch, recorded.chain)
        cursor = fed.cursor
        counts = global_counts(parts, batch, fed.trained, fed.counts)
        meter.compute()

        # forward and backward, by microbatches or a pipeline schedule
        beat.ready()
        parts.faults.reach("compute", step)
        rate = learning_rate(recipe.train, step)
        set_step(optimizer.param_groups, step, rate)
        waited = None if early is None else saves.fence()
        if recipe.lora is not None and recipe.lora.dropout:
            seed_step(recipe.seed, step, world)
        values = passes(fed.rows, counts.scale)
        parts.faults.reach("collective", step, first)
        values = parts.faults.spoil(values, step)
        beat.mark()
        finish_gradients(parameters, spread.missing)

        # clip, step
        norm = total_norm(parameters, world, spread.borrowed) if early is None else early.norm(parameters)
        if recipe.train.clip > 0:
            clip(optimizer, parameters.values(), norm, recipe.train.clip)
        beat.enter("optimizer")
        parts.faults.reach("optimizer", step)
        waited = saves.fence() if early is None else waited  # the next line changes what a save copies
        optimizer.step()
        observed = observed_fp8(parts, step)
        optimizer.zero_grad(set_to_none=True)
        update_balance(spread.model, world.sum_data)
        if parts.average is not None:
            parts.average.follow()

        # record returned steps; requests to stop and to save are reduced with the loss, so that all workers agree
        beat.enter("record")
        requests = [parts.stop.asked, saves.take_save_request(), saves.full()]
        asked = on_device(torch.tensor(requests, dtype=torch.float64), world.device)
        totals = world.sum(torch.cat([*reported(parts, values), asked]))
        note = {
            "step": step,
            "first": first,
            "cursor": cursor,
            "lr": rate,
            "trained": counts.trained,
            "waited": waited,
            "tokens": fed.tokens,
            "counts": counts.sums,
            "metrics": {**fed.metrics, **observed},
        }
        results = meter.end(note, torch.cat([totals, norm.double().reshape(1)]))
        recorded, wanted = record_all(parts, watch, recorded, results, wanted)
        saves.tick()

        # once in a while: compare replicas, evaluate, save
        evaluation = is_due(step, recipe.eval.every_steps, recipe.train.steps) and parts.evaluates
        tiers = tiers_at(recipe.checkpoint, step, requested=wanted.save)
        compared = replicas is not None and replicas.due(step)
        tested = bool(tasks) and is_due(step, recipe.eval.tasks_every_steps or recipe.train.steps, recipe.train.steps)
        if evaluation or tested or tiers or compared or wanted.stop:
            recorded, wanted = record_all(parts, watch, recorded, meter.drain(), wanted)
        saving = bool(tiers) and not wanted.stop and step < recipe.train.steps
        if replicas is not None and (compared or (saving and not wanted.full)):
            compare(parts, replicas, step)
        if evaluation:
            beat.enter("evaluate")
            evaluate(parts, step)
        if tested:
            beat.enter("tasks")  # its passes take many times as long as those of held-out rows
            evaluate_tasks(parts, tasks, step)
        if saving:
            wanted = replace(wanted, save=False)
            if not wanted.full:
                parts.feed.settle()
            beat.enter("save")
            if wanted.full:
                saves.skip(step)
            else:
                saves.save(step, recorded.cursor, recorded.chain, tiers)
                durable = step if "disk" in tiers else durable

    recorded, wanted = record_all(parts, watch, recorded, meter.drain(), wanted)
    save_last(parts, saves, replicas, recorded, durable)
    parts.callbacks.end(recorded.step)
    beat.enter("end")
    return recorded.step >= recipe.train.steps


def save_last(
    parts: Parts, saves: SaveClient, replicas: ReplicaChecker | None, recorded: RunProgress, durable: int
) -> None:
    """Save the last recorded step, unless it is on disk, and wait until all that was saved is."""
    missing = recorded.step > durable
    if missing:
        parts.feed.settle()
    parts.beat.enter("save")
    if missing:
        if replicas is not None and replicas.agreed < recorded.step:
            compare(parts, replicas, recorded.step)
        tiers = tiers_at_end(parts.recipe.checkpoint)
        saves.save(recorded.step, recorded.cursor, recorded.chain, tiers, last=True)
    saves.finish()


@dataclass(frozen=True)
class StepRequests:
    """What any worker has requested, as of the last step read."""

    stop: bool = False
    save: bool = False
    full: bool = False
    """Whether some worker had no free buffer at that step."""


def record(
    parts: Parts, watch: NumericsMonitor, before: RunProgress, result: MeasuredStep, wanted: StepRequests
) -> tuple[RunProgress, StepRequests]:
    """Record a step, extend the chain and return the workers' requests; raise BadNumbers for bad numerics."""
    loss, *metrics, stop, save, full, norm = result.values
    step, first, cursor = (result.note[key] for key in ("step", "first", "cursor"))
    after = RunProgress(step, cursor, chain.extend_chain(before.chain, step, cursor, loss, norm))
    times = {"at": result.end_ns, "step": step, "data": result.data_ns, "compute": result.compute_ns}
    if result.note["waited"] is not None:
        times["checkpoint"] = int(result.note["waited"]() * 1e9)
    if parts.world.first:
        counts = {"tokens": result.note["tokens"]} | ({"trained": result.note["trained"]} if parts.feed.masks else {})
        named = with_sample_size(named_metrics(parts.objective.names, metrics, result.note["counts"]))
        named |= {**result.note["metrics"], "loss": loss, "grad_norm": norm, "lr": result.note["lr"]}
        parts.recorder.event("step", **times, **named, **counts, cursor=cursor, chain=after.chain)
        if parts.callbacks.step(step, named):
            parts.stop.asked = True
    else:
        parts.recorder.event("step", **times)
    # A bad step is recorded too, for people to see. A later attempt starts before it and rolls it back.
    bad = watch.look(step, loss, norm)
    if bad is not None:
        raise BadNumbers(bad, first, max(cursor - first, 1), parts.run)
    return after, StepRequests(wanted.stop or stop > 0, wanted.save or save > 0, full > 0)


def record_all(
    parts: Parts,
    watch: NumericsMonitor,
    recorded: RunProgress,
    results: Iterable[MeasuredStep],
    wanted: StepRequests,
) -> tuple[RunProgress, StepRequests]:
    """Record steps that have returned, in order."""
    for result in results:
        recorded, wanted = record(parts, watch, recorded, result, wanted)
    return recorded, wanted


class GlobalCounts(NamedTuple):
    """What the sums of a step are divided by, over the global batch."""

    sums: tuple[float, ...]
    trained: int

    @property
    def scale(self) -> SumScale:
        """The factors of the sums; those of nothing are 1."""
        return SumScale(tuple(1 / (count or 1) for count in self.sums), 1 / max(1, self.trained))


def global_counts(parts: Parts, batch: int, trained: int, counts: tuple[float, ...]) -> GlobalCounts:
    """Return the counts over all workers from this one's; those of labels are known where none is masked."""
    world = parts.world
    if not parts.feed.masks and isinstance(parts.objective, NextToken):
        trained = batch * parts.recipe.data.seq
        return GlobalCounts((trained,), trained)
    total = world.sum(torch.tensor([trained, *counts], dtype=torch.float64)) * world.data.size / world.size
    return GlobalCounts(tuple(total[1:].tolist()), round(float(total[0])))


def reported(parts: Parts, values: Tensor) -> list[Tensor]:
    """Return the loss and, if there are more sums than it, all of them; in float64, once per tensor axis."""
    loss = loss_of(values, parts.spread.terms).double().reshape(1)
    parts_of = [loss] if len(parts.objective.names) == 1 else [loss, values.double()]
    if parts.world.axis("tensor").rank == 0:
        return parts_of
    return [torch.zeros_like(part) for part in parts_of]


def named_metrics(names: Sequence[str], values: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    """Return an objective's values by name, without those of nothing."""
    return {name: value for name, value, count in zip(names, values, counts, strict=False) if count}


def with_sample_size(named: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the effective sample size, as a share of the tokens, in place of squared ratios."""
    if "ratio_squared" not in named:
        return dict(named)
    rest = {name: value for name, value in named.items() if name != "ratio_squared"}
    return rest | {"effective_samples": effective_sample_share(named["ratio"], named["ratio_squared"])}


def compare(parts: Parts, replicas: ReplicaChecker, step: int) -> None:
    """Compare replicas and record their common digest; raise Corrupted if they differ."""
    with parts.recorder.span("compare"):
        try:
            digest = replicas.compare(step)
        except Corrupted:
            parts.feed.discard(replicas.agreed)  # what the step samples again is identified by the chain before it
            raise
    if parts.world.first:
        parts.recorder.event("replicas", step=step, digest=digest)
    doubted = replicas.doubted(step)
    if doubted is not None:
        parts.recorder.event("doubt", step=step, value=doubted)


def observed_fp8(parts: Parts, step: int) -> dict[str, float]:
    """Return what float8 layers observed, once in a while, as metrics; they then observe anew."""
    float8, section = parts.spread.float8, parts.recipe.train.fp8
    if float8 is None or section is None:
        return {}
    first = parts.world.reports and parts.world.data.rank == 0  # of each stage
    seen = record_observed(parts.recorder, float8, section.alarm, step) if first and fp8_is_due(step) else {}
    float8.forget()
    return seen


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every N steps and after the last is due; 0 means never."""
    return every > 0 and (step % every == 0 or step == last)
