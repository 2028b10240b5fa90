"""How many workers a recipe's mesh needs, and whether it can run; the error says why not, with the numbers."""

import math
from dataclasses import replace

from headway.agent.launch.auto_plan import settings_as_written
from headway.agent.launch.trainer_support import outdated_torch, whole_sequences, working_axes
from headway.errors import HeadwayError, RecipeError, RunError, UsageError, plural
from headway.hardware import Devices, default_cluster, known_chip
from headway.plan.checks import check, divisors
from headway.plan.pipeline import check_schedule
from headway.plan.settings import AXES, Mesh, Settings
from headway.plan.task import schedule_conflict
from headway.plan.trainer import default_microbatch, other_axes, stated_mesh, trainer_software
from headway.recipe import ModelLayout, Parallel, Recipe
from headway.recipe.lora import adapter_tensors
from headway.recipe.patterns import matched


def default_workers(devices: Devices) -> int:
    """Return one per GPU; on a CPU one, which uses all cores."""
    return devices.count if devices.kind == "cuda" else 1


def check_axes(recipe: Recipe) -> None:
    """Raise RecipeError for axes that this version's trainer does not support for a recipe."""
    parallel = recipe.parallel or Parallel()
    wanted = {axis: size for axis in AXES if (size := getattr(parallel, axis)) not in (None, 1)}
    for axis, size in wanted.items():
        if axis == "tensor" and recipe.model.UNCUT:
            raise RecipeError(
                f"parallel.tensor is {size}, but {recipe.model.family} has no tensor axis: {recipe.model.UNCUT}",
                hint=f"use {working_axes(recipe)} axes",
            )
        whole = whole_sequences(recipe) if axis == "context" else None
        if whole is not None:
            raise RecipeError(
                f"parallel.context is {size}, but it does not support {whole}",
                hint=f"its workers need whole sequences: use {working_axes(recipe)} axes",
            )


def check_mesh(recipe: Recipe, workers: int) -> None:
    """Raise RecipeError if the model, its sequences or the batch cannot be divided over a mesh."""
    longest = recipe.model.longest
    if longest is not None and recipe.data.seq > longest:
        raise RecipeError(
            f"data.seq is {recipe.data.seq}, but {recipe.model.family} has positions for {longest} tokens only",
            hint=f"--set data.seq={longest}",
        )
    if recipe.train.update_in_backward and workers > 1:
        raise RecipeError(
            f"train.update_in_backward needs 1 worker, not {workers}",
            hint="--workers 1, or leave it out: several workers reduce gradients",
        )
    if recipe.model.class_ is not None:
        check_stated_layout(recipe, workers)
        return
    check_patterns(recipe)
    cluster = default_cluster(known_chip("cpu"), workers)
    settings = settings_as_written(recipe, cluster)
    if settings.mesh.pipeline == 1:
        settings = replace(settings, microbatch=1)  # only a pipeline's microbatches must be equal
    try:
        check(recipe.model.architecture(), settings, cluster)
    except UsageError as error:
        raise RecipeError(f"[parallel] cannot run: {error.message}", hint=error.hint) from None
    tensor, vocabulary = settings.mesh.tensor, recipe.model.vocab_size or 0
    if 0 < vocabulary <= -(-vocabulary // tensor) * (tensor - 1) and tensor > 1:
        raise RecipeError(
            f"[parallel] cannot run: a vocabulary of {vocabulary} is too small for tensor {tensor}",
            hint="use a smaller tensor axis",
        )
    check_trainer_schedule(settings)


def check_patterns(recipe: Recipe) -> None:
    """Raise RecipeError for patterns that match no parameter, and if all parameters are frozen."""
    names = [*recipe.model.tensors(), *(adapter_tensors(recipe.model, recipe.lora) if recipe.lora else ())]
    if len(matched("train.freeze", recipe.train.freeze, names)) == len(names):
        raise RecipeError("train.freeze matches every parameter: nothing is trained", hint="leave some out of it")
    for i, group in enumerate(recipe.train.groups):
        matched(f"train.groups[{i}].match", group.match, names)


def check_stated_layout(recipe: Recipe, workers: int) -> None:
    """Check that a recipe says enough about a custom model class for its mesh; its workers check the rest."""
    mesh, parallel = stated_mesh(recipe.parallel, workers), recipe.parallel or Parallel()
    layout, class_name = recipe.model.layout or ModelLayout(), recipe.model.class_
    if mesh.tensor > 1 and not (layout.columns and layout.rows):
        raise RecipeError(
            f"parallel.tensor is {mesh.tensor}, but model.layout does not say how to split {class_name}",
            hint="name its linear modules in model.layout.columns and model.layout.rows, or leave parallel.tensor out",
        )
    if mesh.pipeline == 1:
        return
    if layout.blocks is None:
        raise RecipeError(
            f"parallel.pipeline is {mesh.pipeline}, but model.layout does not say where to split {class_name}",
            hint="name its list of blocks in model.layout.blocks, or leave parallel.pipeline out",
        )
    stages, count = parallel.stages, mesh.pipeline * parallel.chunks
    if stages is not None and len(stages) != count:
        raise RecipeError(
            f"parallel.stages has {len(stages)} numbers, but the pipeline has {count} stages",
            hint=f"give {count} numbers, or none",
        )
    settings = _pipeline_settings(recipe, mesh, recipe.train.batch)
    check_microbatch(settings)
    try:
        check_schedule(settings.schedule, mesh.pipeline, settings.chunks, settings.microbatches, count)
    except UsageError as error:
        raise RecipeError(f"[parallel] cannot run: {error.message}", hint=error.hint) from None
    check_trainer_schedule(settings)


def _pipeline_settings(recipe: Recipe, mesh: Mesh, batch: int) -> Settings:
    parallel, software = recipe.parallel or Parallel(), trainer_software(recipe, known_chip("cpu"))
    settings = Settings(mesh, recipe.data.seq, default_microbatch(recipe, mesh), batch, software=software)
    return replace(settings, schedule=parallel.schedule, chunks=parallel.chunks)


def check_microbatch(settings: Settings) -> None:
    """Check that a pipeline's microbatches are all of one size."""
    share = settings.batch // settings.mesh.data
    if share % settings.microbatch:
        sizes = ", ".join(map(str, divisors(share)))
        raise RecipeError(
            f"train.microbatch is {settings.microbatch}, which does not divide the {share} sequences of a data rank",
            hint=f"for a pipeline, use one of {sizes}",
        )


def check_trainer_schedule(settings: Settings) -> None:
    """Check what the trainer's schedules require of a pipeline."""
    if settings.mesh.pipeline > 1 and settings.schedule == "zero-bubble" and outdated_torch() is not None:
        raise RecipeError(
            f"parallel.schedule is {settings.schedule}, which needs a newer PyTorch than {outdated_torch()}",
            hint="use --set parallel.schedule=1f1b or interleaved, or a newer PyTorch",
        )
    clash = schedule_conflict(settings) if settings.mesh.pipeline > 1 else None
    if clash is not None:
        share, ranks = settings.batch // settings.mesh.data, settings.mesh.pipeline
        sizes = [n for n in divisors(share) if schedule_conflict(replace(settings, microbatch=n)) is None]
        hint = f"train.microbatch may be {', '.join(map(str, sizes))}" if sizes else "use --set parallel.schedule=1f1b"
        if not sizes and settings.schedule == "1f1b":
            hint = f"use a batch of {ranks * settings.mesh.data} sequences or more, or fewer stages"
        raise RecipeError(f"[parallel] cannot run: {clash}", hint=hint)


def count_workers(recipe: Recipe, requested: int | None, default: int) -> int:
    """Return the number of workers of a recipe's mesh; an open shard axis takes the rest of the requested or default
    number."""
    parallel = recipe.parallel
    if parallel is None or (requested is not None and requested < 1):
        return requested or default
    others = other_axes(parallel)
    sizes = " x ".join(f"{a} {n}" for a in AXES if a != "expert" and (n := getattr(parallel, a) or 1) > 1) or "shard 1"
    if parallel.shard is None:
        count = requested or max(default, others)
        if count % others:
            multiples = [str(n) for n in (count - count % others, count - count % others + others) if n]
            raise RecipeError(
                f"[parallel] has {sizes}: {plural(others, 'worker')}, which does not divide {count}",
                hint=f"--workers {' or '.join(multiples)}",
            )
        return count
    stated = parallel.shard * others
    if requested not in (None, stated):
        hint = f"--workers {stated}"
        if requested is not None and requested % others == 0:
            hint += f", or --set parallel.shard={requested // others}"
        raise RecipeError(
            f"[parallel] has {sizes}: {plural(stated, 'worker')}, but {requested} were requested", hint=hint
        )
    return stated


def check_workers(recipe: Recipe, workers: int, devices: Devices, resumed: bool = False) -> None:
    """Check that the batch divides evenly over the data ranks, and that every worker has a device.

    The batch of a `resumed` run cannot change.
    """
    if workers < 1:
        raise RunError(f"{workers} workers cannot train", hint="--workers takes 1 or more", usage=True)
    if devices.kind == "cuda" and workers > devices.count:
        raise RunError(
            f"{plural(workers, 'worker')}, but only {plural(devices.count, 'GPU')} ({devices.name})",
            hint=" or ".join([*_fitting_workers(recipe, workers, devices)[:1], "--set train.device=cpu"]),
            usage=True,
        )
    mesh = stated_mesh(recipe.parallel, workers)
    ranks = (
        plural(workers, "worker") if mesh.data == workers else f"{plural(mesh.data, 'data rank')} of {workers} workers"
    )
    for batch in recipe.train.batches:
        if batch % mesh.data:
            below = batch - batch % mesh.data
            nearest = " or ".join(str(value) for value in (below, below + mesh.data) if value > 0)
            key = "train.batch" if batch == recipe.train.batch else "a batch of train.batch_ramp"
            options = [] if resumed else [f"--set train.batch={nearest}" if key == "train.batch" else f"use {nearest}"]
            options += _fitting_workers(recipe, workers, devices) or ["another mesh"]
            raise RecipeError(
                f"{key} is {batch} sequences, which {ranks} cannot share evenly", hint=", or ".join(options)
            )
    if mesh.pipeline > 1 and recipe.train.batch_ramp:
        # microbatches have one size in all steps, and each step needs enough of them
        for batch in recipe.train.batches:
            settings = _pipeline_settings(recipe, mesh, batch)
            check_microbatch(settings)
            check_trainer_schedule(settings)


def _fitting_workers(recipe: Recipe, workers: int, devices: Devices) -> list[str]:
    """Return, as an option, the nearest numbers of workers that share every batch evenly and have a device each."""
    if recipe.parallel is not None and recipe.parallel.shard is not None:
        return []  # the mesh sets it
    others = workers // stated_mesh(recipe.parallel, workers).data
    most = devices.count if devices.kind == "cuda" else others * max(recipe.train.batches)
    fits = [n * others for n in divisors(math.gcd(*recipe.train.batches)) if n * others <= most]
    nearest = [*[n for n in fits if n < workers][-1:], *[n for n in fits if n > workers][:1]]
    return [f"--workers {' or '.join(map(str, nearest))}"] if nearest else []


def mesh_can_run(recipe: Recipe, workers: int) -> bool:
    """Whether a recipe's mesh and batch can be divided over so many workers, wherever they are."""
    try:
        if count_workers(recipe, workers, workers) != workers:
            return False
        check_workers(recipe, workers, Devices("cpu", workers, ""))
        check_mesh(recipe, workers)
    except HeadwayError:
        return False
    return True
