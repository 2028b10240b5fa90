"""Prepares a new or resumed run: everything that is checked, decided and written before the first process starts.

`new_run` and `resume_run` return an Attempt that is ready to run, or raise with nothing changed: data, model, devices
and batch are checked before a run folder is created or touched.
"""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

from headway.agent.attempt import Attempt
from headway.agent.launch.auto_plan import PlannedRecipe, plan_run, replan_run, unplanned
from headway.agent.launch.mesh_checks import check_axes, check_mesh, check_workers, count_workers, default_workers
from headway.agent.launch.teacher import check_teacher, check_vocabulary, resolve_teacher
from headway.agent.saving.restore_points import is_taken, newest_in_store, newest_on_disk
from headway.data.corpus import Corpus, open_corpus
from headway.data.media.corpus import MediaCorpus, open_media_corpus
from headway.errors import (
    HeadwayError,
    ModelError,
    RecipeError,
    RunError,
    StateError,
    UsageError,
    WrongDataVersion,
    plural,
)
from headway.evals.session import EvalOptions, open_tasks
from headway.evals.task import shipped_tasks
from headway.hardware import Devices, devices
from headway.plan.trainer import stated_mesh
from headway.recipe import Data, Eval, FaultPlan, Model, Parallel, Recipe, changed_keys, check_resumable, with_settings
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.find_own_code import check_class
from headway.recipe.huggingface import read_model
from headway.recipe.lora import adapted_layers
from headway.recipe.objective import CustomObjective, Reward
from headway.recipe.patterns import matched
from headway.recipe.sample_tokens import with_sample_tokens
from headway.recipe.upgrade import upgrade_recipe
from headway.state import find_checkpoint, list_checkpoints
from headway.state.address import is_in_store, open_address
from headway.state.base_weights import base_digest, check_base
from headway.state.hf_import import NO_DATA
from headway.state.hf_sidecars import (
    copy_sidecars,
    longest_sequence,
    original_config,
    save_chat_template,
    save_sidecars,
)
from headway.state.peft import check_same_base, lora_of, read_adapter
from headway.track import (
    RunFolder,
    command,
    create_run,
    find_run,
    lock_holder,
    next_attempt,
    read_ends,
    read_plan,
    read_recipe,
    read_run,
    split_ref,
    summarize,
    write_json,
    write_plan,
)
from headway.track.access import umask_of
from headway.track.hub import local_model
from headway.track.lineage import write_origin
from headway.track.own_code import record_code
from headway.track.runs import is_set_aside

FAULTS_VARIABLE = "HEADWAY_FAULTS"
VOCABULARY_MULTIPLE = 64
MANIFEST = "manifest.json"
STORE_PATIENCE_S = 5.0
NOT_SHAPE = {"init", "init_std", "layout"}
"""Model fields that do not affect the shapes of its tensors."""
NOT_IN_FOLDERS = ("text_encoder", "text_tokens")
"""Model fields that a folder of diffusers does not state, and the recipe may."""


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
    """Create a run and return its first attempt. It continues from the state of `origin` (RUN or RUN@STEP), if given,
    by default with as many workers; `on` are its devices, if not those of this machine."""
    store_notes = check_store(recipe)
    if isinstance(recipe.objective, CustomObjective) and on is None:  # other machines may have other packages
        check_class(recipe.objective.class_, "objective.class")
    if recipe.rl is not None and on is None:
        from headway.rl.check import check_rl  # its imports take as long as the rest of a start

        check_rl(recipe.rl)
    recipe = resolve_recipe(recipe, root)
    available = on or devices(recipe.train.device)
    branch = branch_point(root, origin) if origin else None
    checkpoint, workers_before = (None, None) if branch is None else (branch.checkpoint, branch.workers)
    default = workers_before or default_workers(available)
    check_axes(recipe)
    count = count_workers(recipe, workers, max(default, nodes))
    check_workers(recipe, count, available)
    check_mesh(recipe, count)
    _check_nodes(nodes, count)
    if checkpoint is not None:
        check_branch(recipe, checkpoint)
    planned = plan_run(recipe, available, count)
    _faults()

    run = create_run(root, recipe.name, name)
    if recipe.checkpoint.store and not store_notes and is_taken(run, recipe.checkpoint.store):
        shutil.rmtree(run.path, ignore_errors=True)
        raise RunError(
            f"{recipe.checkpoint.store.url} has checkpoints of another run named {run.name}",
            hint="use another --name or another checkpoint.store.url",
            usage=True,
        )
    try:
        with umask_of(run.path):
            write_json(run.recipe_file, planned.recipe.model_dump())
            if planned.plan is not None:
                write_plan(run, planned.plan)
            write_origin(run, recipe.model_dump(), checkpoint, _digests(recipe, checkpoint))
            record_code(run, recipe.model_dump())
            _copy_data_facts(run, recipe.data)
            _copy_companions(run, recipe.model.init)
            _copy_chat_template(run, recipe.data)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise RunError(
            f"cannot write into {root}: {error.strerror}", hint="free some space, or name another folder with --runs"
        ) from None
    notes = [
        *store_notes,
        *_open_data(recipe).notes(),
        *(branch.notes if branch else []),
        *planned.notes,
        *idle_settings(recipe, available, count),
        *new_positions(recipe),
    ]
    mesh = stated_mesh(recipe.parallel, count)
    if recipe.model.class_ is not None and mesh.tensor * mesh.pipeline > 1:
        notes.append("run headway check: a wrong model.layout is silent")
    older = branch.older if branch else ()
    return make_attempt(run, 1, count, available, checkpoint, notes=notes, nodes=nodes, spares=spares, older=older)


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
    """Return the attempt that resumes a run from its newest checkpoint with changed settings; `on` as in `new_run`. If
    `nodes` or `spares` is None, as many are emulated as before."""
    pid = lock_holder(run)
    if pid is not None:
        raise RunError(
            f"run {run.name} is in use by process {pid}",
            hint=f"{run.command('stop')} ends it; headway ps shows its processes; it also recovers by itself",
        )
    old = read_recipe(run)
    if NO_DATA in old.data.parts:
        raise RunError(
            f"run {run.name} was imported: it has weights, but no data and no optimizer state",
            hint=f'start a run from it: model.init = "{run.name}" in a recipe',
            usage=True,
        )
    new = with_settings(old, settings)
    if mesh is not None:
        new = new.model_copy(update={"parallel": mesh})
    root = run.path.parent.parent if is_set_aside(run) else run.path.parent
    reached = summarize(run).step
    saved = new.checkpoint.store is not None or bool(list_checkpoints(run.checkpoints))
    check_resumable(old, new, run.name if saved else None, reached, lambda words: command(root, "train", words))
    new = _same_data(new, run)
    if new.eval != old.eval:
        new = new.model_copy(update={"eval": resolve_tasks(new.eval)})
    if new.lora is not None:
        check_base(new.lora, new.model)
    check_teacher(new)
    check_store(new, ask=False)
    available = on or devices(new.train.device)
    old_plan = read_plan(run)
    stated = new if old_plan is None else unplanned(new, old_plan)
    check_axes(stated)
    events = [event for record in read_run(run) for event in record.events]
    checkpoint, skipped = newest_checkpoint(run, events, new)
    manifest = open_address(checkpoint).manifest if checkpoint else None
    step = manifest.step if manifest else 0
    if step >= new.train.steps:
        raise RunError(
            f"run {run.name} has finished {'its only step' if step == 1 else f'all of its {step:,} steps'}",
            hint=f"{run.command('resume', f'--set train.steps={2 * step}')} continues it",
            usage=True,
        )
    starts = [event for event in events if event["kind"] == "attempt"]
    workers_before = manifest.workers if manifest else starts[-1]["workers"] if starts else None
    count = count_workers(stated, workers, workers_before or default_workers(available))
    check_workers(stated, count, available, resumed=True)
    check_mesh(stated, count)
    _check_nodes(nodes or 1, count)
    planned = replan_run(new, available, count, old=old_plan, workers_before=workers_before)
    changed = changed_keys(old, planned.recipe)
    with umask_of(run.path):
        if changed:
            write_json(run.recipe_file, planned.recipe.model_dump())
        renew_plan(run, planned, step)
    notes = [*skipped, *planned.notes, *idle_settings(new, available, count)]
    if manifest:
        before, now = stated_mesh(old.parallel, manifest.workers), stated_mesh(planned.recipe.parallel, count)
        if before != now:
            change = f"mesh changed from {before.describe()} to {now.describe()}"
            notes.append(f"{change}: state is exact, later steps may differ")
    recipe_changes = {key: list(pair) for key, pair in changed.items()}
    nodes_then, spares_then = emulated_nodes(starts[-1] if starts else {})
    return make_attempt(
        run,
        next_attempt(run),
        count,
        available,
        checkpoint,
        recipe_changes=recipe_changes,
        notes=notes,
        nodes=nodes or min(nodes_then, count),
        spares=spares_then if spares is None else spares,
    )


def emulated_nodes(start: dict[str, Any]) -> tuple[int, int]:
    """Return the nodes and spares that an attempt emulated on one machine, from its start event; (1, 0) if they were
    real machines."""
    return (start.get("nodes", 1), start.get("spares", 0)) if start.get("emulated") else (1, 0)


def nodes_before(run: RunFolder) -> int | None:
    """Return the number of nodes of a run's last attempt; None before the first."""
    records = sorted(run.events.glob("*-agent.jsonl"))
    events = read_ends(records[-1]).events if records else []
    return next((event.get("nodes", 1) for event in events if event["kind"] == "attempt"), None)


def _check_nodes(nodes: int, workers: int) -> None:
    """Check that each node has a worker."""
    if workers < nodes:
        workers_text = f"{plural(workers, 'worker')}"
        raise UsageError(f"--nodes {nodes}, but only {workers_text}", hint=f"--workers {nodes} or more")


def check_store(recipe: Recipe, ask: bool = True) -> list[str]:
    """Check that the recipe's object store can be opened, and has its bucket; return a note if it does not answer."""
    rules = recipe.checkpoint.store
    if rules is None:
        return []
    from headway.state.object_store import open_store

    store = open_store(rules.url, patience_s=STORE_PATIENCE_S)
    try:
        if ask:
            store.list("headway-probe")
    except StateError as error:
        if error.usage:
            raise
        return [f"nothing can be uploaded yet: {error.message}"]
    return []


def idle_settings(recipe: Recipe, available: Devices, workers: int) -> list[str]:
    """Return notes on settings of a recipe that have no effect on these devices."""
    if recipe.train.cuda_graphs and (available.kind != "cuda" or workers > 1):
        setup = "on CPUs" if available.kind != "cuda" else f"with {plural(workers, 'worker')}"
        return [f"train.cuda_graphs has no effect {setup}: it needs one worker on a GPU"]
    return []


def new_positions(recipe: Recipe) -> list[str]:
    """Return a note if sequences are longer than the model that training starts from takes."""
    init, seq = recipe.model.init, recipe.data.seq
    if init is None or recipe.model.class_ is not None or is_in_store(init):
        return []
    folder = Path(init)
    if (folder / "config.json").is_file():
        config = original_config(folder)
        longest = config.get("max_position_embeddings") or config.get("n_positions")
    else:
        base = recipe_of_checkpoint(init)
        longest = longest_sequence(
            base.model, base.data.seq, original_config(RunFolder(folder.parent.parent).companions)
        )
    if not isinstance(longest, int) or seq <= longest:
        return []
    return [f"data.seq is {seq:,}, but {folder.name} takes {longest:,} tokens: later positions are new to it"]


def recipe_of_ref(root: Path, ref: str) -> Recipe:
    """Return the recipe of RUN, RUN@STEP or a checkpoint's address."""
    address = _address(ref)
    return stated_recipe(find_run(root, split_ref(root, ref)[0])) if address is None else recipe_of_checkpoint(address)


def stated_recipe(run: RunFolder) -> Recipe:
    """Return a run's recipe without what its plan filled in, which may not suit other devices."""
    recipe, plan = read_recipe(run), read_plan(run)
    return recipe if plan is None else unplanned(recipe, plan)


def renew_plan(run: RunFolder, planned: PlannedRecipe, step: int) -> None:
    """Replace a run's plan from a step on, if it changed."""
    old, new = read_plan(run), planned.plan
    if new is None:
        run.plan_file.unlink(missing_ok=True)
    elif old is None or new.model_copy(update={"from_step": old.from_step}) != old:
        write_plan(run, new.model_copy(update={"from_step": step}))


def make_attempt(
    run: RunFolder,
    number: int,
    workers: int,
    available: Devices,
    checkpoint: str | None,
    **fields: Any,
) -> Attempt:
    """Make an attempt with other fields as given; cores are divided among workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Attempt(
        run=run.path,
        number=number,
        workers=workers,
        device=available.kind,
        threads=max(1, cores // workers),
        checkpoint=checkpoint,
        from_step=open_address(checkpoint).manifest.step if checkpoint else 0,
        faults=_faults(),
        **fields,
    )


def _faults() -> FaultPlan:
    """Return the fault plan of the environment."""
    text = os.environ.get(FAULTS_VARIABLE, "{}")
    try:
        return FaultPlan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "it"
        raise UsageError(
            f"{FAULTS_VARIABLE} is not a fault plan: {key}: {first['msg']}",
            hint='for example {"faults": [{"action": "kill", "step": 45, "rank": 1}]}',
        ) from None


def resolve_recipe(recipe: Recipe, root: Path) -> Recipe:
    """Fill in what only files know: the data version, the model's shape and vocabulary."""
    recipe, vocabulary = pin_data(recipe)
    recipe = recipe.model_copy(update={"eval": resolve_tasks(recipe.eval)})
    recipe = recipe.model_copy(update={"objective": resolve_teacher(recipe, root)})
    model = resolve_model(recipe.model, root)
    if isinstance(recipe.objective, Reward):
        model = model.model_copy(update={"reward": True})
    elif model.reward:
        raise ModelError(
            f"model.init = {recipe.model.init!r} is a reward model, which predicts no tokens",
            hint="--set objective.kind=reward continues it; any other objective needs the model that it began with",
        )
    if isinstance(model, DiffusionModel):
        return with_sample_tokens(recipe.model_copy(update={"model": model}))
    if model.class_ is not None:
        return recipe.model_copy(update={"model": model})  # the process that initializes it checks it on the data
    if model.vocab_size is None:
        rounded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        model = model.model_copy(update={"vocab_size": rounded})
    elif model.vocab_size < vocabulary:
        raise RecipeError(
            f"model.vocab_size is {model.vocab_size}, but the data was built with {vocabulary} tokens",
            hint="leave model.vocab_size out, or build the data with the model's own tokenizer"
            if model.init is None
            else "set model.init to the folder that the data was built with, or build the data with this one's",
        )
    recipe = recipe.model_copy(update={"model": model})
    check_vocabulary(recipe)
    return resolve_lora(recipe)


def resolve_tasks(settings: Eval) -> Eval:
    """Check the tasks that are evaluated during training, and make their paths absolute."""
    data = None if settings.tasks_data is None else Path(settings.tasks_data).absolute()
    try:
        open_tasks(settings.tasks, EvalOptions(limit=settings.tasks_limit), data=data)
    except HeadwayError as error:
        hint = (error.hint or "").replace("with --data DIR", "with eval.tasks_data")
        raise RecipeError(f"eval.tasks: {error.message}", hint=hint) from None
    named = shipped_tasks()
    tasks = tuple(name if name in named else str(Path(name).absolute()) for name in settings.tasks)
    return settings.model_copy(update={"tasks": tasks, "tasks_data": None if data is None else str(data)})


def resolve_lora(recipe: Recipe) -> Recipe:
    """Pin the base of adapters by its digest, and give them the settings of those that they start from."""
    if recipe.lora is None:
        return recipe
    assert recipe.model.init is not None, "the recipe has a base"
    lora, digest = recipe.lora, base_digest(recipe.model.init, recipe.model)
    if lora.init is not None:
        adapter = read_adapter(Path(lora.init), recipe.model)
        check_same_base(adapter, digest, recipe.model.init)
        lora = lora.starting_from(lora_of(adapter, recipe.model)).model_copy(
            update={"init": str(Path(lora.init).resolve())}
        )
    elif lora.targets:
        adapted_layers(recipe.model, lora.targets)
    return recipe.model_copy(update={"lora": lora.model_copy(update={"base": digest})})


def pin_data(recipe: Recipe) -> tuple[Recipe, int]:
    """Check the data and pin its version and the steps in the recipe; return the recipe and the vocabulary size."""
    corpus = _open_data(recipe)
    return recipe.model_copy(update={"data": corpus.pinned(), "train": corpus.train()}), corpus.vocab_size


def _open_data(recipe: Recipe) -> Corpus | MediaCorpus:
    """Open what a recipe trains on."""
    return open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)


def _digests(recipe: Recipe, checkpoint: str | None) -> dict[str, str]:
    """Return the digests of what a run begins from, as far as manifests have them."""
    addresses = {"from": checkpoint, "init": recipe.model.init, "teacher": getattr(recipe.objective, "teacher", None)}
    digests = {} if recipe.lora is None or recipe.lora.base is None else {"init": recipe.lora.base}
    for name, address in addresses.items():
        if address and (is_in_store(address) or (Path(address) / MANIFEST).is_file()):
            digests[name] = open_address(address).manifest.digest
    return digests


def _same_data(recipe: Recipe, run: RunFolder) -> Recipe:
    """Pin the data of a resumed run, whose version cannot change."""
    try:
        return pin_data(recipe)[0]
    except WrongDataVersion as error:
        raise WrongDataVersion(
            error.message,
            hint="--set data.path=FOLDER names that version where it is now; to train on other data, start a new run: "
            + command(run.path.parent, f"train --from {run.name} --set data.version= --set data.path=FOLDER"),
        ) from None


def _copy_data_facts(run: RunFolder, data: Data) -> None:
    """Copy what gives tokens their meaning into the run folder: the tokenizer, and the manifest of each dataset."""
    folders = {name: Path(part.path) for name, part in data.parts.items()}
    first = next(iter(folders.values()))
    if data.media is None:
        shutil.copyfile(first / "tokenizer.json", run.tokenizer_file)
    if data.mixture:
        manifests = {name: from_json((folder / MANIFEST).read_bytes()) for name, folder in folders.items()}
        end_of_text = next(iter(manifests.values()))["end_of_text"]
        write_json(run.data_file, {"end_of_text": end_of_text, "mixture": manifests})
    else:
        shutil.copyfile(first / MANIFEST, run.data_file)


def _copy_companions(run: RunFolder, init: str | None) -> None:
    """Copy the companions of initial weights into the run folder, from a Hugging Face folder or a run."""
    if init is None or is_in_store(init):
        return
    if (Path(init) / "config.json").is_file():
        save_sidecars(Path(init), run.companions, run.tokenizer_file)
        return
    source = RunFolder(Path(init).parent.parent)
    if source.companions.is_dir() and source.tokenizer_file.is_file():
        copy_sidecars(source.companions, source.tokenizer_file, run.companions, run.tokenizer_file)


def _copy_chat_template(run: RunFolder, data: Data) -> None:
    """Copy the chat template of the data into the run folder, so that a server and an export have it."""
    folder = Path(next(iter(data.parts.values())).path)
    manifest = from_json((folder / MANIFEST).read_bytes())
    if manifest.get("chat"):
        save_chat_template(folder, run.companions, manifest["end_of_text"])


def resolve_model(model: Model, root: Path) -> Model:
    """Give a model the shape of the folder or run it starts from; raise ModelError if the recipe states another."""
    if model.init is None:
        return model
    model = model.model_copy(update={"init": local_model(model.init)})
    assert model.init is not None, "it was one"
    folder = Path(model.init)
    if (folder / MANIFEST).exists() or is_in_store(model.init):
        return _shaped(model, _whole_model(model.init), model.init)
    if folder.is_dir() and model.class_ is not None:
        raise ModelError(
            f"model.init = {model.init!r} is a folder, but a custom class can only start from a run's weights",
            hint="model.init takes RUN or RUN@STEP; without it the class initializes its own weights",
        )
    if folder.is_dir():
        return _shaped(model, read_model(folder), str(folder.resolve()))
    try:
        init = checkpoint_of(root, model.init)
    except RunError as error:
        raise ModelError(
            f"model.init = {model.init!r} is neither a folder nor a run", hint=error.hint or error.message
        ) from None
    return _shaped(model, _whole_model(init), init)


def _whole_model(checkpoint: str) -> Model:
    """Return the model whose weights a checkpoint has; raise ModelError if it has only adapters."""
    recipe = recipe_of_checkpoint(checkpoint)
    if recipe.lora is not None:
        raise ModelError(
            f"model.init = {checkpoint!r} has adapters only, not the weights of a model",
            hint="headway checkpoint merge RUN FOLDER makes a folder that a run can start from",
        )
    return recipe.model


def _shaped(model: Model, shape: Model, init: str) -> Model:
    """Return a model with the shape of what it starts from."""
    if model.family not in (shape.family, "llama"):  # the default
        raise ModelError(
            f"model.family is {model.family} in the recipe and {shape.family} in {model.init}",
            hint="leave model.family out: model.init gives the shape",
        )
    stated, actual, defaults = (m.model_dump(exclude=NOT_SHAPE) for m in (model, shape, type(model)(init=init)))
    chosen = {key: stated[key] for key in NOT_IN_FOLDERS if stated.get(key) != defaults.get(key)}
    for key in {**stated, **actual}:
        if key not in chosen and stated.get(key) not in (actual.get(key), defaults.get(key), {}):
            raise ModelError(
                f"model.{key} is {stated[key]} in the recipe and {actual.get(key)} in {model.init}",
                hint=f"leave model.{key} out: model.init gives the shape",
            )
    update = {**chosen, "init": init, "init_std": model.init_std, "layout": model.layout or shape.layout}
    return shape.model_copy(update=update)


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
