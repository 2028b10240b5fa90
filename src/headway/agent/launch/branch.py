"""The checkpoint that a run continues from: its own newest one, or another run's."""

from pathlib import Path
from typing import Any, NamedTuple

from headway.agent.launch.auto_plan import unplanned
from headway.agent.saving.restore_points import newest_in_store, newest_on_disk
from headway.errors import RecipeError, StateError
from headway.recipe import Recipe
from headway.recipe.patterns import matched
from headway.recipe.upgrade import upgrade_recipe
from headway.state import find_checkpoint, list_checkpoints
from headway.state.address import is_in_store, open_address
from headway.track import RunFolder, find_run, read_plan, read_recipe, read_run, split_ref

MANIFEST = "manifest.json"
NOT_SHAPE = {"init", "init_std", "layout"}
"""Model fields that do not affect the shapes of its tensors."""


class BranchPoint(NamedTuple):
    """The checkpoint of another run that a new one continues from."""

    checkpoint: str
    """Its address."""
    workers: int
    """How many wrote it."""
    older: tuple[str, ...] = ()
    """Checkpoints to use instead if it turns out to be damaged, newest first; none if a step was named."""
    notes: tuple[str, ...] = ()
    """What is wrong with newer ones."""


def branch_point(root: Path, ref: str) -> BranchPoint:
    """Return the checkpoint that a reference names; of RUN without a step the newest that looks intact."""
    if _address(ref) is not None or split_ref(root, ref)[1] is not None:
        checkpoint = checkpoint_of(root, ref)
        return BranchPoint(checkpoint, open_address(checkpoint).manifest.workers)
    run = find_run(root, ref)
    events = [event for record in read_run(run) for event in record.events]
    newest, skipped = newest_checkpoint(run, events, read_recipe(run))
    checkpoint = newest or checkpoint_of(root, ref)  # which raises: the run never saved
    manifest = open_address(checkpoint).manifest
    older = [str(entry.path.resolve()) for entry in list_checkpoints(run.checkpoints) if entry.step < manifest.step]
    notes = [*skipped, f"starting from step {manifest.step} of {run.name}"] if skipped else []
    checkpoint = checkpoint if is_in_store(checkpoint) else str(Path(checkpoint).resolve())
    return BranchPoint(checkpoint, manifest.workers, tuple(reversed(older)), tuple(notes))


def checkpoint_of(root: Path, ref: str) -> str:
    """Return the checkpoint address of RUN, RUN@STEP, a folder or an address in an object store."""
    address = _address(ref)
    if address is not None:
        return address
    name, step = split_ref(root, ref)
    return str(find_checkpoint(find_run(root, name).checkpoints, step).resolve())


def _address(ref: str) -> str | None:
    """Return the address of a checkpoint; None if the reference names a run."""
    if is_in_store(ref):
        return ref
    return str(Path(ref).resolve()) if (Path(ref) / MANIFEST).exists() else None


def recipe_of_ref(root: Path, ref: str) -> Recipe:
    """Return the recipe of RUN, RUN@STEP or a checkpoint's address."""
    address = _address(ref)
    return stated_recipe(find_run(root, split_ref(root, ref)[0])) if address is None else recipe_of_checkpoint(address)


def stated_recipe(run: RunFolder) -> Recipe:
    """Return a run's recipe without what its plan filled in, which may not suit other devices."""
    recipe, plan = read_recipe(run), read_plan(run)
    return recipe if plan is None else unplanned(recipe, plan)


def recipe_of_checkpoint(address: str) -> Recipe:
    """Return the recipe that a checkpoint was saved with; for older ones, that of their run."""
    recipe = open_address(address).manifest.recipe
    return upgrade_recipe(recipe) if recipe else read_recipe(RunFolder(Path(address).parent.parent))


def check_branch(recipe: Recipe, checkpoint: str) -> None:
    """Check that a run can continue from a checkpoint: same shape, same optimizer, and steps left to do."""
    before = recipe_of_checkpoint(checkpoint)
    source, target = (r.model.model_dump(exclude=NOT_SHAPE) for r in (before, recipe))
    for key in source:
        if source[key] != target.get(key):
            raise StateError(
                f"--from: model.{key} is {source[key]} in the checkpoint and {target.get(key)} in the recipe",
                hint="only a model of the same shape can continue from it",
                usage=True,
            )
    if before.lora != recipe.lora:
        raise StateError(
            "--from: the checkpoint and the recipe have different [lora] settings",
            hint="only adapters of the same rank, alpha, targets and base continue; lora.init takes an exported folder",
            usage=True,
        )
    weights_only = f"--set model.init={checkpoint} instead of --from takes only the weights"
    if before.train.optimizer != recipe.train.optimizer:
        raise StateError(
            f"--from: the checkpoint has the state of {before.train.optimizer}, but train.optimizer is "
            f"{recipe.train.optimizer}",
            hint=weights_only,
            usage=True,
        )
    names = [] if recipe.model.class_ is not None else [*recipe.model.tensors()]
    thawed = matched("train.freeze", before.train.freeze, names) - matched("train.freeze", recipe.train.freeze, names)
    if names and thawed:
        raise StateError(
            f"--from: {min(thawed)} was frozen, so the checkpoint has no optimizer state of it",
            hint=weights_only,
            usage=True,
        )
    step = open_address(checkpoint).manifest.step
    if step >= recipe.train.steps:
        raise RecipeError(
            f"--from: the checkpoint is at step {step}, but train.steps is {recipe.train.steps}",
            hint=f"--set train.steps={2 * step}, or --from an earlier step",
        )


def newest_checkpoint(run: RunFolder, events: list[dict[str, Any]], recipe: Recipe) -> tuple[str | None, list[str]]:
    """Return the address of the newest checkpoint that looks intact, and notes on those that do not.

    The address is None if none was ever written; raise StateError if some were and are gone.
    """
    local, damage = newest_on_disk(run.checkpoints)
    stored, problems = newest_in_store(run, recipe.checkpoint.store)
    if stored is not None and (local is None or stored.step > local.step):
        return stored.address, [*damage, *problems, f"resuming from step {stored.step} in the object store"]
    if local is not None:
        return local.address, [*damage, *problems]
    if damage:
        raise StateError(f"run {run.name} has no intact checkpoint; {damage[0]}", hint="put an intact copy there")
    written = [event["step"] for event in events if event["kind"] in ("checkpoint", "upload")]
    started_from = [event["from_step"] for event in events if event["kind"] == "attempt"]
    if written:
        missing = f"run {run.name} saved step {max(written)}, but {run.checkpoints} has no checkpoint now"
        raise StateError(
            "; ".join([missing, *problems]),
            hint="put the folder back, or start a new run of the same recipe",
        )
    if any(started_from):
        raise StateError(
            f"run {run.name} started from another run's step {started_from[0]} and saved nothing of its own",
            hint="start it again with headway train --from",
        )
    return None, problems
