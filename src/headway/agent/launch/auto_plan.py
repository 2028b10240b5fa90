"""Plans a run before it starts: fills the keys that the recipe leaves open (mesh, microbatch, recomputation).

Planning never prevents a run that would work: if it fails, the recipe is trained as written, and a note says why. Only
a pipeline's stages are always filled in, since its workers must agree on them. Workers see only the resulting recipe.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.agent.launch.trainer_support import supported_limits
from headway.errors import HeadwayError, UsageError
from headway.hardware import Cluster, Devices, default_cluster, find_ceilings, find_chip, this_cpu
from headway.plan.candidates import candidates, held_microbatches, settings_of
from headway.plan.context import context_attention
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.estimate import Estimate, estimate
from headway.plan.flops import layer_parameters
from headway.plan.memory import memory
from headway.plan.plan import cap_memory, make_task, narrow_space, plan
from headway.plan.settings import AXES, Mesh, Settings
from headway.plan.stages import stages_by_cost
from headway.plan.task import RUNNABLE, SearchSpace
from headway.plan.trainer import default_microbatch, stated_mesh
from headway.recipe import Parallel, Recipe
from headway.track import RunPlan

WORTH = 0.03
"""Predicted speed-up for which settings as written, if they fit, are given up: less is within the prediction error."""
MESH_WORTH = 0.10
"""The same for a mesh other than one shard axis: its communication was never measured on several GPUs."""
AS_WRITTEN = "training with the recipe as written"
CHOSEN_AXES = tuple(axis for axis in AXES if axis in RUNNABLE.axes)


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe with its plan."""

    recipe: Recipe
    """The recipe with the plan's choices filled in."""
    plan: RunPlan | None
    """None if planning failed."""
    notes: tuple[str, ...] = ()
    """What the user should know before the run starts."""


def plan_run(recipe: Recipe, devices: Devices, workers: int) -> PlannedRecipe:
    """Plan a resolved recipe for so many workers on the given devices."""
    try:
        cluster = _cluster(recipe, devices, workers)
        baseline = _as_written(recipe, cluster)
        best, notes = baseline, tuple[str, ...]()
        # on a CPU, whose figures are assumed, only a memory limit is a reason for other settings
        if devices.kind == "cuda" or recipe.train.memory_gb is not None:
            best, notes = _choose(recipe, baseline, cluster, any_mesh=devices.kind == "cuda")
        chosen = _required(recipe, best.settings) if best is baseline else _chosen(recipe, best.settings)
        return PlannedRecipe(_with(recipe, chosen), _document(best, cluster, chosen), notes)
    except Exception as error:  # whatever is wrong with the planner, train anyway
        return _not_planned(recipe, workers, error)


def replan_run(
    recipe: Recipe, devices: Devices, workers: int, *, old: RunPlan | None, workers_before: int | None
) -> PlannedRecipe:
    """Plan a run that resumes: anew on other devices or another mesh; otherwise its choices stay, and so do its bits.

    `workers_before` is how many workers the run had, for runs without a plan.
    """
    try:
        cluster = _cluster(recipe, devices, workers)
        moved = workers_before not in (None, workers)
        if old is not None:
            moved = old.cluster != cluster.name or not _same_mesh(recipe, old, workers)
            # a memory limit that was set or removed; the memory of a machine without GPUs is no reason to change bits
            limited = recipe.train.memory_gb is not None or devices.kind == "cuda"
            moved = moved or (limited and old.capacity_bytes != cluster.chip.memory_bytes)
        if moved:
            return plan_run(recipe if old is None else unplanned(recipe, old), devices, workers)
        current = _as_written(recipe, cluster)
        required = _required(recipe, current.settings)
        unchanged = {} if old is None else _unchanged(recipe, old)
        return PlannedRecipe(_with(recipe, required), _document(current, cluster, {**unchanged, **required}))
    except Exception as error:  # as above
        return _not_planned(recipe, workers, error)


def _same_mesh(recipe: Recipe, old: RunPlan, workers: int) -> bool:
    schedule = (recipe.parallel.schedule, recipe.parallel.chunks) if recipe.parallel else ("1f1b", 1)
    mesh = stated_mesh(recipe.parallel, workers)
    return asdict(mesh) == dict(old.mesh) and (mesh.pipeline == 1 or schedule == (old.schedule, old.chunks))


def _cluster(recipe: Recipe, devices: Devices, workers: int) -> Cluster:
    chip = this_cpu(workers) if devices.kind == "cpu" else find_chip(devices.name)
    if chip is None:
        raise UsageError(f"unknown GPU {devices.name}")
    return cap_memory(default_cluster(chip, workers), recipe)


def _fidelity(cluster: Cluster) -> Fidelity:
    """Return the best fidelity for these devices: measured kernels, if there are measurements."""
    return "measured" if find_ceilings(cluster.chip) is not None else "default"


# -- settings


def settings_as_written(recipe: Recipe, cluster: Cluster) -> Settings:
    """Return the settings of a recipe as written; open keys mean a worker's whole share at once (in a pipeline, enough
    microbatches to fill it) and no recomputation."""
    mesh, parallel, recompute = stated_mesh(recipe.parallel, cluster.devices), recipe.parallel, recipe.train.recompute
    task = make_task(recipe, cluster)
    settings = replace(
        settings_of(task, mesh, 3 if mesh.owners > 1 else 0, default_microbatch(recipe, mesh)),
        recompute=recompute or "none",
        recompute_blocks=recipe.train.recompute_blocks if recompute else None,
    )
    if parallel is None:
        return settings
    settings = replace(settings, keeps_weights=bool(parallel.keep_weights), reduces_each=bool(parallel.reduce_each))
    settings = replace(settings, context_attention=parallel.context_attention)
    return replace(settings, schedule=parallel.schedule, chunks=parallel.chunks, stages=parallel.stages)


def _as_written(recipe: Recipe, cluster: Cluster) -> Estimate:
    arch = make_task(recipe, cluster).architecture
    return estimate(arch, settings_as_written(recipe, cluster), make_cost_model(cluster, _fidelity(cluster)))


def _choose(recipe: Recipe, baseline: Estimate, cluster: Cluster, any_mesh: bool) -> tuple[Estimate, tuple[str, ...]]:
    """Return the best plan that the trainer supports, unless the baseline, or a plan on its mesh, fits and is about as
    fast; with notes."""
    if recipe.train.microbatch is not None:
        recipe = _with(recipe, {"train.microbatch": baseline.settings.microbatch})
    mesh = None if any_mesh or recipe.parallel is not None else baseline.settings.mesh
    try:
        best = _best(recipe, cluster, mesh)
    except UsageError as error:
        why = f"{error.message}{f': {error.hint}' if error.hint else ''}"
        if baseline.memory.fits:
            return baseline, (f"{why}; {AS_WRITTEN}",)
        return _smallest(recipe, baseline, cluster, mesh), (
            f"{why}; training with the settings that need least memory",
        )
    if baseline.memory.fits and baseline.step.seconds < (1 + WORTH) * best.step.seconds:
        return baseline, ()
    if best.settings.mesh != baseline.settings.mesh:
        try:
            same_mesh = _best(recipe, cluster, baseline.settings.mesh)
        except UsageError:
            return best, ()
        if same_mesh.step.seconds < (1 + MESH_WORTH) * best.step.seconds:
            return same_mesh, ()
    return best, ()


def _best(recipe: Recipe, cluster: Cluster, mesh: Mesh | None) -> Estimate:
    choices = SearchSpace(mesh=mesh, limits=supported_limits(recipe))
    return plan(recipe, cluster, fidelity=_fidelity(cluster), choices=choices, keep=1).best.estimate


def _smallest(recipe: Recipe, baseline: Estimate, cluster: Cluster, mesh: Mesh | None) -> Estimate:
    """Return the settings that need least memory; the prediction may be off by what is missing."""
    choices = narrow_space(recipe, cluster, SearchSpace(mesh=mesh, limits=supported_limits(recipe)))
    if recipe.train.recompute is None:
        choices = replace(choices, recompute=("full",))
    arch, all_settings = baseline.architecture, candidates(make_task(recipe, cluster), cluster, choices)
    need = {settings: memory(arch, settings, cluster, held_microbatches(settings)).total for settings in all_settings}
    smallest = min(need, key=lambda settings: need[settings], default=baseline.settings)
    return estimate(arch, smallest, make_cost_model(cluster, _fidelity(cluster)))


# -- recipe keys


def _chosen(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Return the keys that the recipe leaves open, as planned."""
    settled: dict[str, Any] = {"train.microbatch": settings.microbatch, "train.recompute": settings.recompute}
    if settings.recompute_blocks is not None and settings.recompute != "none":
        settled["train.recompute_blocks"] = settings.recompute_blocks
    mesh, sharded = settings.mesh, settings.mesh.owners > 1 and settings.mesh.pipeline == 1
    stated = recipe.parallel is not None
    if stated or settings.keeps_weights or settings.reduces_each or mesh != Mesh(shard=mesh.devices):
        settled |= {f"parallel.{axis}": getattr(mesh, axis) for axis in CHOSEN_AXES if not stated}
        gathers = {"parallel.keep_weights": settings.keeps_weights, "parallel.reduce_each": settings.reduces_each}
        settled |= gathers if sharded else {}
    if mesh.pipeline > 1:
        settled |= {} if stated else {"parallel.schedule": settings.schedule, "parallel.chunks": settings.chunks}
        settled["parallel.stages"] = list(settings.stages or ())
    return _open(recipe, settled | _attention(recipe, settings))


def _required(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Return the keys that workers of a pipeline or a context axis need and the recipe leaves open."""
    required = _attention(recipe, settings)
    if settings.mesh.pipeline > 1:
        required |= {"train.microbatch": settings.microbatch, "parallel.stages": list(settings.stages or ())}
    return _open(recipe, required)


def _attention(recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """Return how workers of a context axis attend to each other's parts of sequences."""
    if settings.mesh.context == 1:
        return {}
    return {"parallel.context_attention": context_attention(recipe.model.architecture(), settings)}


def _open(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose keys the recipe leaves open."""
    return {key: value for key, value in values.items() if _value(recipe, key) is None}


def unplanned(recipe: Recipe, old: RunPlan) -> Recipe:
    """Return the recipe as its author wrote it, without what the plan filled in."""
    planned, plain = _unchanged(recipe, old), Parallel()
    defaults = {key: getattr(plain, _name(key), None) if key.startswith("parallel.") else None for key in planned}
    stated = _with(recipe, defaults)
    if "parallel.shard" in old.chosen and stated.parallel == plain:  # the plan added the whole section
        return stated.model_copy(update={"parallel": None})
    return stated


def _unchanged(recipe: Recipe, old: RunPlan) -> dict[str, Any]:
    """Return what the plan filled in and the user has not changed since."""
    return {key: value for key, value in old.chosen.items() if _value(recipe, key) == value}


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _value(recipe: Recipe, key: str) -> Any:
    """Return the value of a key as in plan.json; None if the recipe has no such section."""
    section = recipe.train if key.startswith("train.") else recipe.parallel
    value = getattr(section, _name(key), None)
    return list(value) if isinstance(value, tuple) else value


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Set keys of the train and parallel sections of a recipe."""
    update: dict[str, Any] = {}
    for name, section in (("train", recipe.train), ("parallel", recipe.parallel or Parallel())):
        keys = {_name(key): value for key, value in values.items() if key.startswith(f"{name}.")}
        if keys:
            keys = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
            update[name] = section.model_copy(update=keys)
    return recipe.model_copy(update=update) if update else recipe


# -- plan.json


def _document(best: Estimate, cluster: Cluster, chosen: Mapping[str, Any]) -> RunPlan:
    """Return an estimate as plan.json has it."""
    settings, parts = best.settings, asdict(best.memory)
    del parts["rank"]
    return RunPlan(
        cluster=cluster.name,
        chip=cluster.chip.name,
        assumed=cluster.chip.name == "cpu",
        fidelity=_fidelity(cluster),
        mesh=asdict(settings.mesh),
        seq=settings.seq,
        batch=settings.batch,
        microbatch=settings.microbatch,
        recompute=settings.recompute,
        recompute_blocks=settings.recompute_blocks,
        keeps_weights=settings.keeps_weights,
        reduces_each=settings.reduces_each,
        schedule=settings.schedule,
        chunks=settings.chunks,
        stages=settings.stages,
        precision=settings.precision,
        chosen=chosen,
        step_s=best.step.seconds,
        accounts_s=best.step.accounts,
        tokens_s=best.tokens_s,
        mfu=best.mfu,
        mfu_full_attention=best.mfu_full_attention,
        capacity_bytes=parts.pop("capacity"),
        memory_bytes=parts,
    )


def _not_planned(recipe: Recipe, workers: int, error: Exception) -> PlannedRecipe:
    why = error.message if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    return PlannedRecipe(_filled(recipe, workers), None, (f"not planned: {why}; {AS_WRITTEN}",))


def _filled(recipe: Recipe, workers: int) -> Recipe:
    """Fill in what a pipeline's workers need without a plan: stages balanced by FLOPs alone. A custom class is split by
    its workers, which know how many blocks it has."""
    mesh, model, parallel = stated_mesh(recipe.parallel, workers), recipe.model, recipe.parallel
    if mesh.pipeline == 1 or parallel is None:
        return recipe
    settled: dict[str, Any] = {"train.microbatch": default_microbatch(recipe, mesh)}
    if model.class_ is None:
        arch = model.architecture()
        block = layer_parameters(arch, False) + arch.heads * arch.head_dim * recipe.data.seq
        head = arch.vocab * arch.dim / block
        settled["parallel.stages"] = list(stages_by_cost(arch.layers, 0.0, head, mesh.pipeline, parallel.chunks))
    return _with(recipe, _open(recipe, settled))
