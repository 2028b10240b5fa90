"""Everything that is decided, checked and written down before the first process starts.

`new_run` and `resume_run` either return an Attempt that is ready to be supervised or raise with nothing changed:
data, model, devices and batch are checked before a run folder is made or touched.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from headway.agent.attempt import Attempt
from headway.agent.launch.auto_plan import PlannedRecipe, plan_run, replan_run, unplanned
from headway.agent.launch.mesh_checks import check_axes, check_mesh, check_workers, count_workers, default_workers
from headway.agent.saving.restore_points import is_taken, newest_in_store, newest_on_disk
from headway.data.corpus import open_corpus
from headway.errors import ModelError, RecipeError, RunError, StateError, UsageError
from headway.hardware import Devices, devices
from headway.plan.trainer import stated_mesh
from headway.recipe import Data, FaultPlan, Model, Parallel, Recipe, changed_keys, check_resumable, with_settings
from headway.recipe.huggingface import read_model
from headway.recipe.patterns import matched
from headway.recipe.upgrade import upgrade_recipe
from headway.state import find_checkpoint
from headway.state.address import is_in_store, open_address
from headway.state.hf_import import NO_DATA
from headway.state.hf_sidecars import pass_on_companions, save_sidecars
from headway.track import (
    RunFolder,
    create_run,
    find_run,
    lock_holder,
    next_attempt,
    parse_ref,
    read_ends,
    read_plan,
    read_recipe,
    read_run,
    write_json,
    write_plan,
)

__all__ = ["new_run", "nodes_before", "recipe_of_ref", "resolve_recipe", "resume_run", "stated_recipe"]

FAULTS_VARIABLE = "HEADWAY_FAULTS"
VOCABULARY_MULTIPLE = 64
MANIFEST = "manifest.json"
STORE_PATIENCE_S = 5.0
OF_NO_SHAPE = {"init", "init_std", "layout"}
"""Fields of a model that do not decide what its tensors look like."""


def new_run(
    recipe: Recipe,
    root: Path,
    *,
    name: str | None = None,
    workers: int | None = None,
    origin: str | None = None,
    on: Devices | None = None,
    nodes: int = 1,
    spares: int = 0,
) -> Attempt:
    """A new run's first attempt. `origin` (RUN or RUN@STEP) makes it go on from another run's state; `on` are the
    devices that it will have, where those of this machine are not meant."""
    store_notes = check_store(recipe)
    recipe = resolve_recipe(recipe, root)
    found = on or devices(recipe.train.device)
    check_axes(recipe, workers or default_workers(found))
    count = count_workers(recipe, workers, max(default_workers(found), nodes))
    check_workers(recipe, count, found)
    check_mesh(recipe, count)
    _check_nodes(nodes, count)
    checkpoint = checkpoint_of(root, origin) if origin else None
    if checkpoint is not None:
        check_branch(recipe, checkpoint)
    planned = plan_run(recipe, found, count)
    _faults()

    run = create_run(root, recipe.name, name)
    if recipe.checkpoint.store and not store_notes and is_taken(run, recipe.checkpoint.store):
        shutil.rmtree(run.path, ignore_errors=True)
        raise RunError(
            f"{recipe.checkpoint.store.url} has checkpoints of another run of the name {run.name}",
            hint="another --name, or another checkpoint.store.url",
        )
    try:
        write_json(run.recipe_file, planned.recipe.model_dump())
        if planned.plan is not None:
            write_plan(run, planned.plan)
        _keep_data_facts(run, recipe.data)
        _keep_companions(run, recipe.model.init)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise RunError(
            f"cannot write into {root}: {error.strerror}", hint="free some space, or name another folder with --runs"
        ) from None
    notes = [*store_notes, *planned.notes, *idle_settings(recipe, found, count)]
    mesh = stated_mesh(recipe.parallel, count)
    if recipe.model.class_ is not None and mesh.tensor * mesh.pipeline > 1:
        notes.append("run headway check: a wrong model.layout is silent")
    attempt = make_attempt(run, 1, count, found, checkpoint, notes=notes)
    return attempt.model_copy(update={"nodes": nodes, "spares": spares})


def resume_run(
    run: RunFolder,
    settings: list[str],
    *,
    workers: int | None = None,
    mesh: Parallel | None = None,
    on: Devices | None = None,
    nodes: int | None = 1,
    spares: int | None = 0,
) -> Attempt:
    """The attempt that continues a run from its newest checkpoint, with the settings that may change; `on` as in
    `new_run`. Where `nodes` or `spares` is None, as many are emulated as were before."""
    pid = lock_holder(run)
    if pid is not None:
        raise RunError(
            f"run {run.name} is in use by process {pid}",
            hint=f"headway stop {run.name} ends it; headway ps shows its processes; left alone, it goes on by itself",
        )
    old = read_recipe(run)
    if NO_DATA in old.data.parts:
        raise RunError(
            f"run {run.name} was imported: it has weights, but neither data nor an optimizer's state",
            hint=f'start a run from it: model.init = "{run.name}" in a recipe',
        )
    new, _ = pin_data(with_settings(old, settings))
    if mesh is not None:
        new = new.model_copy(update={"parallel": mesh})
    check_store(new, ask=False)
    found = on or devices(new.train.device)
    old_plan = read_plan(run)
    stated = new if old_plan is None else unplanned(new, old_plan)
    check_axes(stated, workers or default_workers(found))
    check_resumable(old, new)
    events = [event for record in read_run(run) for event in record.events]
    checkpoint, passed_over = newest_checkpoint(run, events, new)
    manifest = open_address(checkpoint).manifest if checkpoint else None
    step = manifest.step if manifest else 0
    if step >= new.train.steps:
        raise RunError(
            f"run {run.name} has done all of its {step} steps",
            hint=f"headway resume {run.name} --set train.steps={2 * step} trains on",
        )
    starts = [event for event in events if event["kind"] == "attempt"]
    before = manifest.workers if manifest else starts[-1]["workers"] if starts else None
    count = count_workers(stated, workers, before or default_workers(found))
    check_workers(stated, count, found)
    check_mesh(stated, count)
    _check_nodes(nodes or 1, count)
    planned = replan_run(new, found, count, old=old_plan, before=before)
    changed = changed_keys(old, planned.recipe)
    if changed:
        write_json(run.recipe_file, planned.recipe.model_dump())
    renew_plan(run, planned, step)
    notes = [*passed_over, *planned.notes, *idle_settings(new, found, count)]
    if manifest:
        meshes = [stated_mesh(old.parallel, manifest.workers), stated_mesh(planned.recipe.parallel, count)]
        if meshes[0] != meshes[1]:
            notes.append(
                f"{meshes[0].describe()} before, {meshes[1].describe()} now: the state is taken over exactly, "
                "the steps after it are not promised bit for bit"
            )
    recipe_changes = {key: list(pair) for key, pair in changed.items()}
    had = emulated_nodes(starts[-1] if starts else {})
    update = {"nodes": nodes or min(had[0], count), "spares": had[1] if spares is None else spares}
    attempt = make_attempt(run, next_attempt(run), count, found, checkpoint, recipe_changes, notes)
    return attempt.model_copy(update=update)


def emulated_nodes(start: dict[str, Any]) -> tuple[int, int]:
    """Nodes and spares that an attempt emulated on one machine, by the event of its start; none where they were
    machines of their own."""
    return (start.get("nodes", 1), start.get("spares", 0)) if start.get("emulated") else (1, 0)


def nodes_before(run: RunFolder) -> int | None:
    """Machines that the workers of a run's last attempt were on; None before the first."""
    records = sorted(run.events.glob("*-agent.jsonl"))
    events = read_ends(records[-1]).events if records else []
    return next((event.get("nodes", 1) for event in events if event["kind"] == "attempt"), None)


def _check_nodes(nodes: int, workers: int) -> None:
    """Each has a worker."""
    if workers < nodes:
        raise UsageError(
            f"--nodes {nodes}, and {workers} worker{'s' * (workers > 1)}", hint=f"--workers {nodes} or more"
        )


def check_store(recipe: Recipe, ask: bool = True) -> list[str]:
    """See that the recipe's object store can be opened; one that does not answer now may do so when it is needed."""
    rules = recipe.checkpoint.store
    if rules is None:
        return []
    from headway.state.object_store import open_store

    store = open_store(rules.url, patience_s=STORE_PATIENCE_S)
    try:
        if ask:
            store.list("headway-asks-whether-you-are-there")
    except StateError as error:
        return [f"the object store does not answer yet: {error.message}"]
    return []


def idle_settings(recipe: Recipe, found: Devices, workers: int) -> list[str]:
    """What a recipe asks for that does nothing on these devices."""
    if recipe.train.cuda_graphs and (found.kind != "cuda" or workers > 1):
        where = "on CPUs" if found.kind != "cuda" else f"with {workers} workers"
        return [f"train.cuda_graphs has no effect {where}: it is for one worker on a GPU"]
    return []


def recipe_of_ref(root: Path, ref: str) -> Recipe:
    """The recipe of what RUN, RUN@STEP or a checkpoint's address names."""
    address = _address(ref)
    return stated_recipe(find_run(root, parse_ref(ref)[0])) if address is None else recipe_of_checkpoint(address)


def stated_recipe(run: RunFolder) -> Recipe:
    """A run's recipe without what its plan filled in: other devices may want it otherwise."""
    recipe, plan = read_recipe(run), read_plan(run)
    return recipe if plan is None else unplanned(recipe, plan)


def renew_plan(run: RunFolder, planned: PlannedRecipe, step: int) -> None:
    """Replace a run's plan by one that holds from here on, if it says something else."""
    old, new = read_plan(run), planned.plan
    if new is None:
        run.plan_file.unlink(missing_ok=True)
    elif old is None or new.model_copy(update={"from_step": old.from_step}) != old:
        write_plan(run, new.model_copy(update={"from_step": step}))


def make_attempt(
    run: RunFolder,
    number: int,
    workers: int,
    found: Devices,
    checkpoint: str | None,
    recipe_changes: dict[str, Any] | None = None,
    notes: list[str] | None = None,
) -> Attempt:
    """Put an attempt together; threads are shared out so that workers do not fight over cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    step = open_address(checkpoint).manifest.step if checkpoint else 0
    return Attempt(
        run=run.path,
        number=number,
        workers=workers,
        device=found.kind,
        threads=max(1, cores // workers),
        checkpoint=checkpoint,
        from_step=step,
        recipe_changes=recipe_changes or {},
        notes=notes or [],
        faults=_faults(),
    )


def _faults() -> FaultPlan:
    """Faults on purpose that the environment asks for."""
    text = os.environ.get(FAULTS_VARIABLE, "{}")
    try:
        return FaultPlan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UsageError(
            f"{FAULTS_VARIABLE} is no plan of faults: {where}: {first['msg']}",
            hint='for example {"faults": [{"action": "kill", "step": 45, "rank": 1}]}',
        ) from None


def resolve_recipe(recipe: Recipe, root: Path) -> Recipe:
    """Fill in what only the disk knows: the data's version, the model's shape and vocabulary."""
    recipe, vocabulary = pin_data(recipe)
    model = resolve_model(recipe.model, root)
    if model.class_ is not None:
        return recipe.model_copy(update={"model": model})  # whoever draws its weights sees what it makes of the data
    if model.vocab_size is None:
        rounded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        model = model.model_copy(update={"vocab_size": rounded})
    elif model.vocab_size < vocabulary:
        raise RecipeError(
            f"model.vocab_size is {model.vocab_size}, but the data was built with {vocabulary} tokens",
            hint="leave model.vocab_size out, or build the data with the model's own tokenizer",
        )
    return recipe.model_copy(update={"model": model})


def pin_data(recipe: Recipe) -> tuple[Recipe, int]:
    """The recipe with its data checked and its version written in, so that no other is ever taken for it."""
    corpus = open_corpus(recipe)
    data = corpus.pinned()
    return recipe.model_copy(update={"data": data}), corpus.vocab_size


def _keep_data_facts(run: RunFolder, data: Data) -> None:
    """Leave in a run's folder what its data's tokens mean: the tokenizer, and the manifest of each data set."""
    folders = {name: Path(part.path) for name, part in data.parts.items()}
    first = next(iter(folders.values()))
    shutil.copyfile(first / "tokenizer.json", run.tokenizer_file)
    if data.mixture:
        manifests = {name: from_json((folder / MANIFEST).read_bytes()) for name, folder in folders.items()}
        end_of_text = next(iter(manifests.values()))["end_of_text"]
        write_json(run.data_file, {"end_of_text": end_of_text, "mixture": manifests})
    else:
        shutil.copyfile(first / MANIFEST, run.data_file)


def _keep_companions(run: RunFolder, init: str | None) -> None:
    """Leave in a run's folder what came with the weights that it begins with, from a Hugging Face folder or a run."""
    if init is None or is_in_store(init):
        return
    if (Path(init) / "config.json").is_file():
        save_sidecars(Path(init), run.companions, run.tokenizer_file)
        return
    source = RunFolder(Path(init).parent.parent)
    if source.companions.is_dir() and source.tokenizer_file.is_file():
        pass_on_companions(source.companions, source.tokenizer_file, run.companions, run.tokenizer_file)


def resolve_model(model: Model, root: Path) -> Model:
    """A model that starts from a folder or a run takes that one's shape; a recipe that states another is refused."""
    if model.init is None:
        return model
    folder = Path(model.init)
    if (folder / MANIFEST).exists() or is_in_store(model.init):
        return _shaped(model, recipe_of_checkpoint(model.init).model, model.init)
    if folder.is_dir() and model.class_ is not None:
        raise ModelError(
            f"model.init = {model.init!r} is a folder, and a class of your own starts from a run's weights only",
            hint="model.init takes RUN or RUN@STEP; without it the class draws its own",
        )
    if folder.is_dir():
        return _shaped(model, read_model(folder), str(folder.resolve()))
    try:
        init = checkpoint_of(root, model.init)
    except RunError as error:
        raise ModelError(
            f"model.init = {model.init!r} is neither a folder nor a run", hint=error.hint or error.message
        ) from None
    return _shaped(model, recipe_of_checkpoint(init).model, init)


def _shaped(model: Model, shape: Model, init: str) -> Model:
    """The model with the shape of what it starts from."""
    if model.family not in (shape.family, "llama"):  # which it is where a recipe does not say
        raise ModelError(
            f"model.family is {model.family} in the recipe and {shape.family} in {model.init}",
            hint="leave model.family out: model.init gives the shape",
        )
    stated, there, defaults = (m.model_dump(exclude=OF_NO_SHAPE) for m in (model, shape, type(model)()))
    for key in {**stated, **there}:
        if stated.get(key) not in (there.get(key), defaults.get(key), {}):
            raise ModelError(
                f"model.{key} is {stated[key]} in the recipe and {there.get(key)} in {model.init}",
                hint=f"leave model.{key} out: model.init gives the shape",
            )
    own = {"init": init, "init_std": model.init_std, "layout": model.layout or shape.layout}
    return shape.model_copy(update=own)


def checkpoint_of(root: Path, ref: str) -> str:
    """The address of the checkpoint that RUN, RUN@STEP, a folder or an address in an object store means."""
    address = _address(ref)
    if address is not None:
        return address
    name, step = parse_ref(ref)
    return str(find_checkpoint(find_run(root, name).checkpoints, step).resolve())


def _address(ref: str) -> str | None:
    """Where a checkpoint lies, if that is what a reference says; None if it names a run."""
    if is_in_store(ref):
        return ref
    return str(Path(ref).resolve()) if (Path(ref) / MANIFEST).exists() else None


def recipe_of_checkpoint(address: str) -> Recipe:
    """The recipe that a checkpoint was saved with; older ones have it in the run they lie in only."""
    recipe = open_address(address).manifest.recipe
    return upgrade_recipe(recipe) if recipe else read_recipe(RunFolder(Path(address).parent.parent))


def check_branch(recipe: Recipe, checkpoint: str) -> None:
    """A run that goes on from another's state must have its shape and its optimizer, and steps left to do."""
    before = recipe_of_checkpoint(checkpoint)
    source, wanted = (r.model.model_dump(exclude=OF_NO_SHAPE) for r in (before, recipe))
    for key in source:
        if source[key] != wanted.get(key):
            raise StateError(
                f"--from: model.{key} is {source[key]} in the checkpoint and {wanted.get(key)} in the recipe",
                hint="only a model of the same shape can go on from it",
            )
    weights_alone = f"--set model.init={checkpoint} instead of --from takes the weights alone"
    if before.train.optimizer != recipe.train.optimizer:
        raise StateError(
            f"--from: the checkpoint has the state of {before.train.optimizer}, and train.optimizer is "
            f"{recipe.train.optimizer}",
            hint=weights_alone,
        )
    names = [] if recipe.model.class_ is not None else [*recipe.model.tensors()]
    thawed = matched("train.freeze", before.train.freeze, names) - matched("train.freeze", recipe.train.freeze, names)
    if names and thawed:
        raise StateError(
            f"--from: {min(thawed)} was frozen, so that the checkpoint has no state of its optimizer",
            hint=weights_alone,
        )
    step = open_address(checkpoint).manifest.step
    if step >= recipe.train.steps:
        raise RecipeError(
            f"--from: the checkpoint has done {step} steps, and train.steps is {recipe.train.steps}",
            hint=f"--set train.steps={2 * step}, or --from an earlier step",
        )


def newest_checkpoint(run: RunFolder, events: list[dict[str, Any]], recipe: Recipe) -> tuple[str | None, list[str]]:
    """The address of the newest checkpoint that looks whole, and notes on those that do not.

    None if none was ever written; an error if some were and are gone.
    """
    here, damage = newest_on_disk(run.checkpoints)
    there, trouble = newest_in_store(run, recipe.checkpoint.store)
    if there is not None and (here is None or there.step > here.step):
        return there.address, [*damage, *trouble, f"going on from step {there.step} in the object store"]
    if here is not None:
        return here.address, [*damage, *trouble]
    if damage:
        raise StateError(
            f"run {run.name} has no checkpoint that is whole; {damage[0]}", hint="put another copy of one there"
        )
    written = [event["step"] for event in events if event["kind"] in ("checkpoint", "upload")]
    started_from = [event["from_step"] for event in events if event["kind"] == "attempt"]
    if written:
        raise StateError(
            "; ".join(
                [f"run {run.name} saved step {max(written)}, but {run.checkpoints} holds no checkpoint now", *trouble]
            ),
            hint="put the folder back, or start a new run of the same recipe",
        )
    if any(started_from):
        raise StateError(
            f"run {run.name} began from another run's step {started_from[0]} and saved nothing of its own",
            hint="start it again with headway train --from",
        )
    return None, trouble
