"""What the planner settles for a run about to start: how many sequences at once, and whether to recompute activations.

A plan never stops a run that would work: where none can be made the recipe is trained as it stands, and a note says
why.
Workers see nothing of it but the recipe.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.errors import HeadwayError, UsageError
from headway.hardware import Cluster, Devices, default_cluster, find_ceilings, find_chip, this_cpu
from headway.plan.candidates import settings_of
from headway.plan.costs import Fidelity, make_costs
from headway.plan.estimate import Estimate, estimate
from headway.plan.plan import make_task, plan
from headway.plan.settings import Mesh
from headway.plan.task import RUNNABLE, Choices
from headway.recipe import Recipe
from headway.track import RunPlan

__all__ = ["Planned", "plan_again", "plan_run", "unplanned"]

WORTH = 0.03
"""Gain in speed for which the plain way is left, where that fits: predictions err by more than less would win."""
GOES_ON = "the run goes on as the recipe stands"


@dataclass(frozen=True)
class Planned:
    """A recipe with what was planned for it."""

    recipe: Recipe
    """With the plan's choices filled in."""
    plan: RunPlan | None
    """None where none could be made."""
    notes: tuple[str, ...] = ()
    """What the user should know before the run starts."""


def plan_run(recipe: Recipe, found: Devices, workers: int) -> Planned:
    """The best way that the trainer runs a resolved recipe on so many of the devices found."""
    try:
        cluster = _cluster(found, workers)
        plain = _plain(recipe, cluster)
        way, notes = plain, tuple[str, ...]()
        if found.kind == "cuda":
            way, notes = _choose(recipe, plain, cluster)
        chosen = {} if way is plain else _chosen(recipe, way)
        return Planned(_with(recipe, chosen), _document(way, cluster, chosen), notes)
    except Exception as error:  # whatever is wrong with the planner, it is no reason not to train
        return Planned(recipe, None, (_not_planned(error),))


def plan_again(recipe: Recipe, found: Devices, workers: int, *, old: RunPlan | None, before: int | None) -> Planned:
    """The plan of a run that goes on: a new one on other devices; on the same ones its choices stay, and its bits.

    `before` is how many workers the run had, for runs without a plan.
    """
    try:
        cluster = _cluster(found, workers)
        moved = before not in (None, workers) if old is None else old.cluster != cluster.name
        if moved:
            return plan_run(recipe if old is None else unplanned(recipe, old), found, workers)
        kept = {} if old is None else _kept(recipe, old)
        return Planned(recipe, _document(_plain(recipe, cluster), cluster, kept))
    except Exception as error:  # as above
        return Planned(recipe, None, (_not_planned(error),))


def unplanned(recipe: Recipe, old: RunPlan) -> Recipe:
    """The recipe as its author wrote it: without what the plan filled in."""
    return _with(recipe, dict.fromkeys(_kept(recipe, old)))


def _cluster(found: Devices, workers: int) -> Cluster:
    chip = this_cpu(workers) if found.kind == "cpu" else find_chip(found.name)
    if chip is None:
        raise UsageError(f"nothing is known of {found.name}")
    return default_cluster(chip, workers)


def _fidelity(cluster: Cluster) -> Fidelity:
    """What is known best of these devices: kernels as measured on one of them, where somebody did."""
    return "measured" if find_ceilings(cluster.chip) is not None else "default"


def _plain(recipe: Recipe, cluster: Cluster) -> Estimate:
    """The recipe as it stands: what it leaves open is a worker's whole share at once, and no recomputation."""
    task, devices = make_task(recipe, cluster), cluster.devices
    share = recipe.train.batch // devices
    settings = settings_of(
        task, Mesh(shard=devices), 3 if devices > 1 else 0, min(recipe.train.microbatch or share, share)
    ).but(recompute="full" if recipe.train.checkpoint_activations else "none")
    return estimate(task.architecture, settings, make_costs(cluster, _fidelity(cluster)))


def _choose(recipe: Recipe, plain: Estimate, cluster: Cluster) -> tuple[Estimate, tuple[str, ...]]:
    """The best plan among what the trainer runs, unless the plain way fits and is about as fast."""
    if recipe.train.microbatch is not None:
        recipe = _with(recipe, {"train.microbatch": plain.settings.microbatch})
    try:
        runnable = Choices(limits=RUNNABLE)
        best = plan(recipe, cluster, fidelity=_fidelity(cluster), choices=runnable, keep=1).best.estimate
    except UsageError as error:
        why = f"{error.message}{f': {error.hint}' if error.hint else ''}"
        if plain.memory.fits:
            return plain, (f"{why}; {GOES_ON}",)
        return _smallest(recipe, plain, cluster), (f"{why}; the run tries what needs least",)
    about_as_fast = plain.step.seconds < (1 + WORTH) * best.step.seconds
    return (plain if plain.memory.fits and about_as_fast else best), ()


def _smallest(recipe: Recipe, plain: Estimate, cluster: Cluster) -> Estimate:
    """What needs least of all that the recipe leaves open; a prediction may be off by what is missing."""
    settings = plain.settings
    if recipe.train.microbatch is None:
        settings = settings.but(microbatch=1)
    if recipe.train.checkpoint_activations is None:
        settings = settings.but(recompute="full")
    return estimate(plain.architecture, settings, make_costs(cluster, _fidelity(cluster)))


def _chosen(recipe: Recipe, way: Estimate) -> dict[str, Any]:
    """The keys that the recipe leaves open, as the plan has them."""
    settled = {
        "train.microbatch": way.settings.microbatch,
        "train.checkpoint_activations": way.settings.recompute == "full",
    }
    return {key: value for key, value in settled.items() if _value(recipe, key) is None}


def _kept(recipe: Recipe, old: RunPlan) -> dict[str, Any]:
    """What the plan filled in and nobody has changed since."""
    return {key: value for key, value in old.chosen.items() if _value(recipe, key) == value}


def _value(recipe: Recipe, key: str) -> Any:
    return getattr(recipe.train, key.removeprefix("train."))


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys of its train section set."""
    update = {key.removeprefix("train."): value for key, value in values.items()}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=update)}) if update else recipe


def _document(way: Estimate, cluster: Cluster, chosen: Mapping[str, Any]) -> RunPlan:
    """An estimate as plan.json has it."""
    settings, parts = way.settings, asdict(way.memory)
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


def _not_planned(error: Exception) -> str:
    why = error.message if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
    return f"not planned: {why}; {GOES_ON}"
