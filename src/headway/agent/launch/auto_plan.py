"""What the planner settles for a run about to start: the mesh, sequences at once, and what is recomputed.

A plan never stops a run that would work: where none can be made the recipe is trained as it stands, and a note says
why. Only a pipeline's stages are always settled, since its workers must agree on them.
Workers see nothing of it but the recipe.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.agent.launch.trainer_support import supported_limits
from headway.errors import HeadwayError, UsageError
from headway.hardware import Cluster, Devices, default_cluster, find_ceilings, find_chip, this_cpu
from headway.plan.architecture import architecture_of
from headway.plan.candidates import candidates, held_microbatches, settings_of
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.estimate import Estimate, estimate
from headway.plan.flops import layer_parameters
from headway.plan.memory import memory
from headway.plan.plan import capped, fixed, make_task, plan
from headway.plan.settings import AXES, Mesh, Settings
from headway.plan.stages import stages_by_cost
from headway.plan.task import RUNNABLE, SearchSpace
from headway.plan.trainer import default_microbatch, stated_mesh
from headway.recipe import Parallel, Recipe
from headway.track import RunPlan

__all__ = ["PlannedRecipe", "plan_run", "replan_run", "settings_as_written", "unplanned"]

WORTH = 0.03
"""Gain in speed for which the plain way is left, where that fits: predictions err by more than less would win."""
MESH_WORTH = 0.10
"""The same for another mesh than shards over all workers: what that exchanges was never measured on several GPUs."""
GOES_ON = "training with the recipe as written"
CHOSEN_AXES = tuple(axis for axis in AXES if axis in RUNNABLE.axes)


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe with what was planned for it."""

    recipe: Recipe
    """With the plan's choices filled in."""
    plan: RunPlan | None
    """None where none could be made."""
    notes: tuple[str, ...] = ()
    """What the user should know before the run starts."""


def plan_run(recipe: Recipe, found: Devices, workers: int) -> PlannedRecipe:
    """The best way that the trainer runs a resolved recipe on so many of the devices found."""
    try:
        cluster = _cluster(recipe, found, workers)
        plain = _plain(recipe, cluster)
        way, notes = plain, tuple[str, ...]()
        # on a CPU, whose figures are assumed, only memory that somebody has counted is a reason for another way
        if found.kind == "cuda" or recipe.train.memory_gb is not None:
            way, notes = _choose(recipe, plain, cluster, any_mesh=found.kind == "cuda")
        chosen = _needed(recipe, way.settings) if way is plain else _chosen(recipe, way.settings)
        return PlannedRecipe(_with(recipe, chosen), _document(way, cluster, chosen), notes)
    except Exception as error:  # whatever is wrong with the planner, it is no reason not to train
        return _not_planned(recipe, workers, error)


def replan_run(
    recipe: Recipe, found: Devices, workers: int, *, old: RunPlan | None, before: int | None
) -> PlannedRecipe:
    """The plan of a run that goes on: a new one on other devices or another mesh; otherwise its choices stay, and its
    bits.

    `before` is how many workers the run had, for runs without a plan.
    """
    try:
        cluster = _cluster(recipe, found, workers)
        moved = before not in (None, workers)
        if old is not None:
            moved = old.cluster != cluster.name or not _same_mesh(recipe, old, workers)
            # a budget that was set or taken back; what a machine without GPUs has is no reason to change bits
            counts = recipe.train.memory_gb is not None or found.kind == "cuda"
            moved = moved or (counts and old.capacity_bytes != cluster.chip.memory_bytes)
        if moved:
            return plan_run(recipe if old is None else unplanned(recipe, old), found, workers)
        way = _plain(recipe, cluster)
        needed = _needed(recipe, way.settings)
        kept = {} if old is None else _kept(recipe, old)
        return PlannedRecipe(_with(recipe, needed), _document(way, cluster, {**kept, **needed}))
    except Exception as error:  # as above
        return _not_planned(recipe, workers, error)


def _same_mesh(recipe: Recipe, old: RunPlan, workers: int) -> bool:
    order = (recipe.parallel.schedule, recipe.parallel.chunks) if recipe.parallel else ("1f1b", 1)
    mesh = stated_mesh(recipe.parallel, workers)
    return asdict(mesh) == dict(old.mesh) and (mesh.pipeline == 1 or order == (old.schedule, old.chunks))


def _cluster(recipe: Recipe, found: Devices, workers: int) -> Cluster:
    chip = this_cpu(workers) if found.kind == "cpu" else find_chip(found.name)
    if chip is None:
        raise UsageError(f"nothing is known of {found.name}")
    return capped(default_cluster(chip, workers), recipe)


def _fidelity(cluster: Cluster) -> Fidelity:
    """What is known best of these devices: kernels as measured on one of them, where somebody did."""
    return "measured" if find_ceilings(cluster.chip) is not None else "default"


# -- ways to run


def settings_as_written(recipe: Recipe, cluster: Cluster) -> Settings:
    """The recipe as it stands: what it leaves open is a worker's whole share at once, in a pipeline enough
    microbatches to fill it, and no recomputation."""
    mesh, parallel, again = stated_mesh(recipe.parallel, cluster.devices), recipe.parallel, recipe.train.recompute
    task = make_task(recipe, cluster)
    settings = settings_of(task, mesh, 3 if mesh.shard > 1 else 0, default_microbatch(recipe, mesh)).but(
        recompute=again or "none", recompute_blocks=recipe.train.recompute_blocks if again else None
    )
    if parallel is None:
        return settings
    settings = settings.but(keeps_weights=bool(parallel.keep_weights), reduces_each=bool(parallel.reduce_each))
    return settings.but(schedule=parallel.schedule, chunks=parallel.chunks, stages=parallel.stages)


def _plain(recipe: Recipe, cluster: Cluster) -> Estimate:
    arch = make_task(recipe, cluster).architecture
    return estimate(arch, settings_as_written(recipe, cluster), make_cost_model(cluster, _fidelity(cluster)))


def _choose(recipe: Recipe, plain: Estimate, cluster: Cluster, any_mesh: bool) -> tuple[Estimate, tuple[str, ...]]:
    """The best plan among what the trainer runs, unless the plain way, or another on its mesh, fits and is about as
    fast."""
    if recipe.train.microbatch is not None:
        recipe = _with(recipe, {"train.microbatch": plain.settings.microbatch})
    mesh = None if any_mesh or recipe.parallel is not None else plain.settings.mesh
    try:
        best = _best(recipe, cluster, mesh)
    except UsageError as error:
        why = f"{error.message}{f': {error.hint}' if error.hint else ''}"
        if plain.memory.fits:
            return plain, (f"{why}; {GOES_ON}",)
        return _smallest(recipe, plain, cluster, mesh), (f"{why}; the run tries what needs least",)
    enough = (1 + WORTH) * best.step.seconds
    if plain.memory.fits and plain.step.seconds < enough:
        return plain, ()
    if best.settings.mesh != plain.settings.mesh:
        try:
            same = _best(recipe, cluster, plain.settings.mesh)
        except UsageError:
            return best, ()
        return (same if same.step.seconds < (1 + MESH_WORTH) * best.step.seconds else best), ()
    return best, ()


def _best(recipe: Recipe, cluster: Cluster, mesh: Mesh | None) -> Estimate:
    choices = SearchSpace(mesh=mesh, limits=supported_limits(recipe.model))
    return plan(recipe, cluster, fidelity=_fidelity(cluster), choices=choices, keep=1).best.estimate


def _smallest(recipe: Recipe, plain: Estimate, cluster: Cluster, mesh: Mesh | None) -> Estimate:
    """What needs least of all that the recipe leaves open; a prediction may be off by what is missing."""
    choices = fixed(recipe, cluster, SearchSpace(mesh=mesh, limits=supported_limits(recipe.model)))
    if recipe.train.recompute is None:
        choices = replace(choices, recompute=("full",))
    arch, ways = plain.architecture, candidates(make_task(recipe, cluster), cluster, choices)
    need = {way: memory(arch, way, cluster, held_microbatches(way)).total for way in ways}
    least = min(need, key=lambda way: need[way], default=plain.settings)
    return estimate(arch, least, make_cost_model(cluster, _fidelity(cluster)))


# -- keys of the recipe


def _chosen(recipe: Recipe, way: Settings) -> dict[str, Any]:
    """The keys that the recipe leaves open, as the plan has them."""
    settled: dict[str, Any] = {"train.microbatch": way.microbatch, "train.recompute": way.recompute}
    if way.recompute_blocks is not None and way.recompute != "none":
        settled["train.recompute_blocks"] = way.recompute_blocks
    mesh, sharded = way.mesh, way.mesh.shard > 1 and way.mesh.pipeline == 1
    stated = recipe.parallel is not None
    if stated or way.keeps_weights or way.reduces_each or mesh != Mesh(shard=mesh.devices):
        settled |= {f"parallel.{axis}": getattr(mesh, axis) for axis in CHOSEN_AXES if not stated}
        gathers = {"parallel.keep_weights": way.keeps_weights, "parallel.reduce_each": way.reduces_each}
        settled |= gathers if sharded else {}
    if mesh.pipeline > 1:
        settled |= {} if stated else {"parallel.schedule": way.schedule, "parallel.chunks": way.chunks}
        settled["parallel.stages"] = list(way.stages or ())
    return {key: value for key, value in settled.items() if _value(recipe, key) is None}


def _needed(recipe: Recipe, way: Settings) -> dict[str, Any]:
    """What a pipeline's workers must know, where the recipe leaves it open."""
    if way.mesh.pipeline == 1:
        return {}
    settled = {"train.microbatch": way.microbatch, "parallel.stages": list(way.stages or ())}
    return {key: value for key, value in settled.items() if _value(recipe, key) is None}


def unplanned(recipe: Recipe, old: RunPlan) -> Recipe:
    """The recipe as its author wrote it: without what the plan filled in."""
    kept, plain = _kept(recipe, old), Parallel()
    defaults = {key: getattr(plain, _name(key), None) if key.startswith("parallel.") else None for key in kept}
    left = _with(recipe, defaults)
    section_is_the_plans = "parallel.shard" in old.chosen
    return left.model_copy(update={"parallel": None}) if section_is_the_plans and left.parallel == plain else left


def _kept(recipe: Recipe, old: RunPlan) -> dict[str, Any]:
    """What the plan filled in and nobody has changed since."""
    return {key: value for key, value in old.chosen.items() if _value(recipe, key) == value}


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _value(recipe: Recipe, key: str) -> Any:
    """As plan.json has it; None where the recipe has no such section."""
    section = recipe.train if key.startswith("train.") else recipe.parallel
    value = getattr(section, _name(key), None)
    return list(value) if isinstance(value, tuple) else value


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys of its train and parallel sections set."""
    update: dict[str, Any] = {}
    for name, section in (("train", recipe.train), ("parallel", recipe.parallel or Parallel())):
        keys = {_name(key): value for key, value in values.items() if key.startswith(f"{name}.")}
        if keys:
            keys = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
            update[name] = section.model_copy(update=keys)
    return recipe.model_copy(update=update) if update else recipe


# -- what is written down


def _document(way: Estimate, cluster: Cluster, chosen: Mapping[str, Any]) -> RunPlan:
    """An estimate as plan.json has it."""
    settings, parts = way.settings, asdict(way.memory)
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
        step_s=way.step.seconds,
        accounts_s=way.step.accounts,
        tokens_s=way.tokens_s,
        mfu=way.mfu,
        mfu_full_attention=way.mfu_full_attention,
        capacity_bytes=parts.pop("capacity"),
        memory_bytes=parts,
    )


def _not_planned(recipe: Recipe, workers: int, error: Exception) -> PlannedRecipe:
    why = error.message if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    return PlannedRecipe(_filled(recipe, workers), None, (f"not planned: {why}; {GOES_ON}",))


def _filled(recipe: Recipe, workers: int) -> Recipe:
    """With what a pipeline's workers must know, where there is no plan: stages cut by their FLOPs alone. A class of
    the user's own is cut by its workers, who know how many blocks it has."""
    mesh, model, parallel = stated_mesh(recipe.parallel, workers), recipe.model, recipe.parallel
    if mesh.pipeline == 1 or parallel is None:
        return recipe
    settled: dict[str, Any] = {"train.microbatch": default_microbatch(recipe, mesh)}
    if model.class_ is None:
        arch = architecture_of(model)
        block = layer_parameters(arch, False) + arch.heads * arch.head_dim * recipe.data.seq
        head = arch.vocab * arch.dim / block
        settled["parallel.stages"] = list(stages_by_cost(arch.layers, 0.0, head, mesh.pipeline, parallel.chunks))
    return _with(recipe, {key: value for key, value in settled.items() if _value(recipe, key) is None})
