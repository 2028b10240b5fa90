"""The whole training step, top to bottom: batch, forward, backward, clip, step, record.

The loss of a step is the sum over the unmasked tokens of the global batch divided by their count over the global
batch: every worker divides its own sums by that same count, and gradients are added up, so that no split into
microbatches or workers changes what is computed. The host never waits for the device to learn a loss: results come
back through the meter, and only then extend the chain and the record.
"""

import torch

from headway.parallel import finish_gradients, total_norm
from headway.track import chain
from headway.train.build import Parts, Progress, RecordLost
from headway.train.evaluate import evaluate
from headway.train.meter import Measured
from headway.train.save import save
from headway.train.schedule import learning_rate

__all__ = ["train"]


def train(parts: Parts) -> bool:
    """Train from where the parts stand; True when all steps are done, False when stopped before."""
    recipe, world, spread, optimizer, meter = parts.recipe, parts.world, parts.spread, parts.optimizer, parts.meter
    parameters = dict(spread.model.named_parameters())
    recorded = saved = parts.start
    step, cursor, stopping = recorded.step, recorded.cursor, False

    while step < recipe.train.steps and not stopping:
        step += 1
        parts.faults.reach("start", step)
        if parts.recorder.failed:
            raise RecordLost(parts.recorder.failed)

        # the batch: this worker's rows of the samples that the cursor points at
        meter.begin()
        parts.faults.reach("data", step)
        inputs, labels, trained = parts.feed.read(cursor)
        cursor += recipe.train.batch
        if parts.feed.masks:
            trained = int(world.sum(torch.tensor([trained]))) * world.data.size // world.size
        else:
            trained = recipe.train.batch * recipe.data.seq
        meter.compute()

        # forward and backward, a microbatch at a time or as a pipeline's stages take turns
        parts.faults.reach("compute", step)
        loss = spread.passes(inputs, labels, 1 / max(1, trained))
        finish_gradients(parameters, spread.missing)

        # clip, step
        norm = total_norm(parameters, world, spread.borrowed)
        if recipe.train.clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), recipe.train.clip, norm)
        rate = learning_rate(recipe.train, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # record what has come back; a wish to stop travels with the loss, so all workers stop at the same step
        wish = torch.tensor(float(parts.stop.asked), device=world.device)
        mine = loss.double() if world.axis("tensor").rank == 0 else torch.zeros_like(loss, dtype=torch.float64)
        totals = world.sum(torch.stack([mine, wish.double()]))
        note = {"step": step, "cursor": cursor, "lr": rate, "trained": trained}
        for result in meter.end(note, torch.cat([totals, norm.double().reshape(1)])):
            recorded, stopping = record(parts, recorded, result)

        # once in a while: evaluate, save
        evaluation = is_due(step, recipe.eval.every_steps, recipe.train.steps) and parts.held_out.size > 0
        checkpoint = is_due(step, recipe.checkpoint.every_steps, recipe.train.steps)
        if evaluation or checkpoint or stopping:
            for result in meter.drain():
                recorded, stopping = record(parts, recorded, result, stopping)
        if evaluation:
            evaluate(parts, step)
        if checkpoint:
            save(parts, recorded)
            saved = recorded

    for result in meter.drain():
        recorded, _ = record(parts, recorded, result)
    if recorded.step > saved.step:
        save(parts, recorded)
    return recorded.step >= recipe.train.steps


def record(parts: Parts, before: Progress, result: Measured, stopping: bool = False) -> tuple[Progress, bool]:
    """Write one step's event; extend the chain; say whether any worker has been asked to stop."""
    loss, wish, norm = result.values
    step, cursor = result.note["step"], result.note["cursor"]
    after = Progress(step, cursor, chain.extend(before.chain, step, cursor, loss, norm))
    times = {"at": result.end_ns, "step": step, "data": result.data_ns, "compute": result.compute_ns}
    if parts.world.first:
        tokens = parts.recipe.train.batch * parts.recipe.data.seq
        counts = {"tokens": tokens} | ({"trained": result.note["trained"]} if parts.feed.masks else {})
        metrics = {"loss": loss, "grad_norm": norm, "lr": result.note["lr"]}
        parts.recorder.event("step", **times, **metrics, **counts, cursor=cursor, chain=after.chain)
    else:
        parts.recorder.event("step", **times)
    return after, stopping or wish > 0


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every so many steps, and after the last, is due; 0 is never."""
    return every > 0 and (step % every == 0 or step == last)
