"""Headway's trainer as the planner models it: the software of a recipe's step, its mesh and microbatch.

Keep in sync with `train/` and `parallel/`:
- axes replicate, shard, tensor, pipeline, expert, context (`task.RUNNABLE`): FSDP2 over the data and context axes,
  weights gathered per block in the GEMMs' precision, gradients reduced in float32 once per step;
- float32 weights and moments unless the recipe says otherwise; bfloat16 by FSDP's mixed precision, or by autocast on a
  single data rank;
- tensor parallelism with sequence parallelism that keeps gathered inputs, and vocabulary-parallel embedding and loss;
- pipeline stages cut by cost, weights gathered once per step;
- experts in bfloat16 as one function, without biases and an expert axis;
- in float8, weights held in it where a worker has all of them, else cast at each use; gathered in it if tensorwise;
- a chunked loss; the host never waits for a step.
"""

from dataclasses import replace
from math import prod

from headway.hardware import Chip
from headway.plan.checks import divisors
from headway.plan.optimizer import optimizer_footprint
from headway.plan.settings import Mesh, Settings, Software
from headway.plan.task import schedule_conflict
from headway.recipe import Model, Parallel, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.fp8 import Fp8, fp8_layers

LOOP_S = 0.012
"""Host seconds per step beside the layers, measured on an H200 host."""
ROTARY_PASSES = {False: 24.0, True: 2.0}
"""Passes over queries and keys that RoPE takes, eager and compiled: it runs in float32."""


def other_axes(parallel: Parallel) -> int:
    """Size of the mesh without its shard axis."""
    return prod((parallel.replicate, parallel.tensor, parallel.pipeline, parallel.context))


def stated_mesh(parallel: Parallel | None, workers: int) -> Mesh:
    """A recipe's mesh: all shard if it states none; an open shard axis takes what the other axes leave."""
    if parallel is None:
        return Mesh(shard=workers)
    shard = parallel.shard or max(1, workers // other_axes(parallel))
    return Mesh(parallel.replicate, shard, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)


def default_microbatch(recipe: Recipe, mesh: Mesh) -> int:
    """The microbatch without a plan: as stated, or a data rank's full share.

    For a pipeline, the largest that its schedule supports with at least twice as many microbatches as stages, else 1.
    """
    share = max(1, recipe.train.batch // mesh.data)
    if recipe.train.microbatch is not None or mesh.pipeline == 1:
        return min(recipe.train.microbatch or share, share)
    order = recipe.parallel.schedule if recipe.parallel else "1f1b"
    for size in reversed(divisors(share)):
        count = share // size
        fills = order != "interleaved" or count % mesh.pipeline == 0
        trial = Settings(mesh, recipe.data.seq, size, recipe.train.batch, schedule=order, software=Software("eager"))
        if count >= 2 * mesh.pipeline and fills and schedule_conflict(trial) is None:
            return size
    return 1


def trainer_precision(recipe: Recipe) -> str:
    """Precision of the GEMMs of linear layers."""
    if recipe.train.fp8 is not None:
        return "fp8"
    return "bf16" if recipe.train.dtype == "bfloat16" else "float32"


def trainer_software(recipe: Recipe, chip: Chip) -> Software:
    """The trainer's software for a recipe on a chip; `Software.on_mesh` adds what depends on the mesh."""
    train = recipe.train
    older = chip.name.startswith(("a100", "l40s", "rtx", "cpu"))
    software = headway_software(
        compiled=recipe.compiles("cpu" if chip.name == "cpu" else "cuda"),
        autocasts=train.dtype == "bfloat16",
        older=older,
        offloads=train.offload_optimizer,
    )
    if train.deterministic:
        software = replace(software, attention="flash2")
    if isinstance(recipe.model, DiffusionModel):  # every worker of a tensor axis has the whole sequence
        software = replace(software, sequence_parallel=False, regathers=True)
        if train.deterministic and not older:
            software = replace(software, attention="cudnn-flash2")
    if recipe.model.family == "gpt_oss":  # its experts have biases
        software = replace(software, fused_experts=False)
    fp8 = train.fp8
    if fp8 is not None:
        by_tensor = fp8.scaling == "tensorwise"
        software = replace(software, scaling="tensor" if by_tensor else "row")
        software = replace(
            software,
            gathers_low_precision=by_tensor and fp8.gather,
            holds_low_weights=True,
            low_parts=_float8_parts(recipe.model, fp8),
        )
    return replace(
        software,
        updates_in_backward=train.update_in_backward,
        weight_bytes=4 if train.weights == "float32" else 2,
        master_bytes=4 if train.master else 0,
        moment_bytes=4 if train.moments == "float32" else 2,
        states=None if recipe.model.class_ is not None else optimizer_footprint(recipe.model, train, recipe.lora),
    )


def _float8_parts(model: Model, fp8: Fp8) -> frozenset[str] | None:
    """Parts of a layer of which any linear layer is in float8; None, which is all, for diffusion."""
    if isinstance(model, DiffusionModel) or model.vocab_size is None:
        return None
    return frozenset(_part_of(name) for name in fp8_layers(model, fp8).chosen)


def _part_of(name: str) -> str:
    """The part of a layer in which the plan counts a linear layer: layers.3.mlp.shared.up is in shared."""
    part, inner = name.split(".")[2:4]
    return inner if inner in ("experts", "shared") else part


def headway_software(*, compiled: bool, autocasts: bool, older: bool, offloads: bool = False) -> Software:
    """The trainer's software: compiled or not, in bfloat16 or not, on a chip before Hopper or not."""
    return Software(
        fusion="compiled" if compiled else "eager",
        attention="flash2" if older else "cudnn",
        loss="chunked",
        rotary_passes=ROTARY_PASSES[compiled],
        fused_experts=autocasts,
        separate_projections=True,
        autocasts=autocasts,
        regathers=False,
        weight_bytes=4,
        master_bytes=0,
        moment_bytes=4,
        gradient_bytes=4,
        reduce_bytes=4,
        recompute_host=2.5,
        keeps_gemm_outputs=True,
        offloads_moments=offloads,
        waits_each_step=False,
        loop_s=LOOP_S,
        is_headway=True,
    )
