"""Prepares a new or resumed run: everything that is checked, decided and written before the first process starts.

`new_run` and `resume_run` return an Attempt that is ready to run, or raise with nothing changed: data, model, devices
and batch are checked before a run folder is created or touched.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from headway.agent.attempt import Attempt
from headway.agent.launch.auto_plan import PlannedRecipe, plan_run, replan_run, unplanned
from headway.agent.launch.branch import MANIFEST, branch_point, check_branch, newest_checkpoint, recipe_of_checkpoint
from headway.agent.launch.mesh_checks import check_axes, check_mesh, check_workers, count_workers, default_workers
from headway.agent.launch.resolve import open_data, pin_data, resolve_recipe, resolve_tasks
from headway.agent.launch.teacher import check_teacher
from headway.agent.saving.restore_points import is_taken
from headway.data.media.prompt_lengths import check_sample_prompts
from headway.errors import (
    RunError,
    StateError,
    UsageError,
    WrongDataVersion,
    plural,
)
from headway.hardware import Devices, devices
from headway.plan.trainer import stated_mesh
from headway.recipe import Data, FaultPlan, Parallel, Recipe, changed_keys, check_resumable, with_mesh, with_settings
from headway.recipe.exactness import check_exactness, with_exactness
from headway.recipe.find_own_code import check_class
from headway.recipe.objective import CustomObjective
from headway.state import list_checkpoints
from headway.state.address import is_in_store, open_address
from headway.state.base_weights import check_base
from headway.state.hf_import import NO_DATA
from headway.state.hf_sidecars import (
    copy_sidecars,
    longest_sequence,
    original_config,
    save_chat_template,
    save_sidecars,
)
from headway.track import (
    RunFolder,
    command,
    create_run,
    lock_holder,
    next_attempt,
    read_ends,
    read_plan,
    read_recipe,
    read_run,
    summarize,
    write_json,
    write_plan,
)
from headway.track.access import umask_of
from headway.track.lineage import write_origin
from headway.track.own_code import record_code
from headway.track.runs import is_set_aside

FAULTS_VARIABLE = "HEADWAY_FAULTS"
STORE_PATIENCE_S = 5.0


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
    recipe = with_exactness(recipe, available.kind)
    check_exactness(recipe, available.kind)
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
        *open_data(recipe).notes(),
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
    old = _recipe_to_resume(run)
    new = _changed_recipe(run, old, settings, mesh)
    available = on or devices(new.train.device)
    check_exactness(new, available.kind)
    old_plan = read_plan(run)
    stated = new if old_plan is None else unplanned(new, old_plan)
    check_axes(stated)
    events = [event for record in read_run(run) for event in record.events]
    checkpoint, skipped = newest_checkpoint(run, events, new)
    manifest = open_address(checkpoint).manifest if checkpoint else None
    step = manifest.step if manifest else 0
    check_unfinished(run, step, new.train.steps)
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


def _recipe_to_resume(run: RunFolder) -> Recipe:
    """Return a run's recipe; raise RunError if it cannot be resumed, whatever is changed."""
    pid = lock_holder(run)
    if pid is not None:
        raise RunError(
            f"run {run.name} is in use by process {pid}",
            hint=f"{run.command('stop')} ends it; headway ps shows its processes; it also recovers by itself",
        )
    recipe = read_recipe(run)
    if NO_DATA in recipe.data.parts:
        raise RunError(
            f"run {run.name} was imported: it has weights, but no data and no optimizer state",
            hint=f'start a run from it: model.init = "{run.name}" in a recipe',
            usage=True,
        )
    return recipe


def _changed_recipe(run: RunFolder, old: Recipe, settings: list[str], mesh: Parallel | None) -> Recipe:
    """Return the recipe with changed settings, with the data that the run began with."""
    new = with_settings(old, settings)
    if mesh is not None:
        new = with_mesh(new, mesh, "--mesh")
    root = run.path.parent.parent if is_set_aside(run) else run.path.parent
    reached = summarize(run).step
    saved = new.checkpoint.store is not None or bool(list_checkpoints(run.checkpoints))
    check_resumable(old, new, run.name if saved else None, reached, lambda words: command(root, "train", words))
    new = _same_data(new, run)
    if new.eval != old.eval:
        new = new.model_copy(update={"eval": resolve_tasks(new.eval)})
        check_sample_prompts(new, resumed=True)
    if new.lora is not None:
        check_base(new.lora, new.model)
    check_teacher(new)
    check_store(new, ask=False)
    return new


def check_unfinished(run: RunFolder, step: int, steps: int) -> None:
    """Raise RunError if a run has nothing left to do after a step."""
    if step > steps:
        raise RunError(
            f"run {run.name} is at step {step:,} already, and train.steps is {steps:,}",
            hint=f"leave train.steps out: {run.command('resume')}",
            usage=True,
        )
    if step == steps:
        raise RunError(
            f"run {run.name} has finished {'its only step' if step == 1 else f'all of its {step:,} steps'}",
            hint=f"{run.command('resume', f'--set train.steps={2 * step}')} continues it",
            usage=True,
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
