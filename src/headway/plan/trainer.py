"""Headway's own trainer as the planner sees it: what its step does, for a recipe on some devices.

Facts of this version, to be changed with `train/` and `parallel/`:
- axes replicate, shard, tensor, pipeline (`task.RUNNABLE`): FSDP2 over the data axes, sharded weights gathered block by
  block in the products' precision, gradients added up in float32, once a step;
- float32 weights and moments, or what the recipe says; bfloat16 by FSDP's policy, and by autocast where nobody shares
  the data;
- a tensor axis with sequence parallelism that keeps what it gathered, vocabulary-parallel embedding, head and loss;
- a pipeline's stages cut by cost, its weights gathered once a step;
- a loss made in chunks, the host never waiting for a step.
"""

from dataclasses import replace
from math import prod

from headway.hardware import Chip
from headway.plan.checks import divisors
from headway.plan.optimizer import states_of
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.task import pipeline_clash
from headway.recipe import Parallel, Recipe

__all__ = ["default_microbatch", "other_axes", "own_software", "stated_mesh", "trainer_precision", "trainer_software"]

LOOP_S = 0.012
"""Host seconds of a step beside its layers, embedding and loss to optimizer: measured on an H200's host."""
ROTARY_PASSES = {False: 24.0, True: 2.0}
"""Passes over queries and keys of the rotary embedding, as it stands and compiled: it is written out in float32."""


def other_axes(parallel: Parallel) -> int:
    """Workers that a mesh takes for each place of its shard axis."""
    return prod((parallel.replicate, parallel.tensor, parallel.pipeline, parallel.context))


def stated_mesh(parallel: Parallel | None, workers: int) -> Mesh:
    """A recipe's mesh: all shards where it states none; its shard axis takes what the others leave where that is
    open."""
    if parallel is None:
        return Mesh(shard=workers)
    shard = parallel.shard or max(1, workers // other_axes(parallel))
    return Mesh(parallel.replicate, shard, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)


def default_microbatch(recipe: Recipe, mesh: Mesh) -> int:
    """Sequences at once where nobody has planned: what the recipe states, or a data rank's whole share.

    That would leave a pipeline empty most of the time: there, the largest that gives it twice as many microbatches as
    stages, in numbers that its schedule takes; failing that, one.
    """
    share = max(1, recipe.train.batch // mesh.data)
    if recipe.train.microbatch is not None or mesh.pipeline == 1:
        return min(recipe.train.microbatch or share, share)
    order = recipe.parallel.schedule if recipe.parallel else "1f1b"
    for size in reversed(divisors(share)):
        count = share // size
        fills = order != "interleaved" or count % mesh.pipeline == 0
        trial = Settings(mesh, recipe.data.seq, size, recipe.train.batch, schedule=order, software=Software("eager"))
        if count >= 2 * mesh.pipeline and fills and pipeline_clash(trial) is None:
            return size
    return 1


def trainer_precision(recipe: Recipe) -> str:
    """Of the matrix products."""
    return "bf16" if recipe.train.dtype == "bfloat16" else "float32"


def trainer_software(recipe: Recipe, chip: Chip) -> Software:
    """What the trainer's step does with a recipe on devices of a kind; on a mesh, `Software.on` says the rest."""
    train = recipe.train
    older = chip.name.startswith(("a100", "l40s", "rtx", "cpu"))
    software = own_software(
        compiled=recipe.compiles("cpu" if chip.name == "cpu" else "cuda"),
        autocasts=train.dtype == "bfloat16",
        older=older,
        offloads=train.offload_optimizer,
    )
    return replace(
        software,
        updates_early=train.update_in_backward,
        weight_bytes=4 if train.weights == "float32" else 2,
        master_bytes=4 if train.master else 0,
        moment_bytes=4 if train.moments == "float32" else 2,
        states=None if recipe.model.class_ is not None else states_of(recipe.model, train),
    )


def own_software(*, compiled: bool, autocasts: bool, older: bool, offloads: bool = False) -> Software:
    """What the trainer's step does: compiled or not, in bfloat16 or not, on a chip before Hopper or not."""
    return Software(
        fusion="compiled" if compiled else "eager",
        attention="flash2" if older else "cudnn",
        loss="chunked",
        rotary_passes=ROTARY_PASSES[compiled],
        separate_products=True,
        autocasts=autocasts,
        regathers=False,
        weight_bytes=4,
        master_bytes=0,
        moment_bytes=4,
        gradient_bytes=4,
        reduce_bytes=4,
        recompute_host=2.5,
        keeps_products=True,
        offloads_moments=offloads,
        waits=False,
        loop_s=LOOP_S,
        own=True,
    )
