"""Fills in what only files know: the version of data, the shape of a model, the base of adapters, paths of tasks."""

from pathlib import Path

from headway.agent.launch.branch import MANIFEST, NOT_SHAPE, checkpoint_of, recipe_of_checkpoint
from headway.agent.launch.teacher import check_vocabulary, resolve_teacher
from headway.data.corpus import Corpus, open_corpus
from headway.data.media.corpus import MediaCorpus, open_media_corpus
from headway.data.media.prompt_lengths import check_captions, check_sample_prompts
from headway.errors import HeadwayError, ModelError, RecipeError, RunError
from headway.evals.session import EvalOptions, open_tasks
from headway.evals.task import shipped_tasks
from headway.recipe import Eval, Model, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.fp8 import fp8_layers
from headway.recipe.huggingface import read_model
from headway.recipe.lora import adapted_layers
from headway.recipe.objective import Reward
from headway.recipe.sample_tokens import with_sample_tokens
from headway.state.address import is_in_store
from headway.state.base_weights import base_digest
from headway.state.peft import check_same_base, lora_of, read_adapter
from headway.track import RunFolder
from headway.track.hub import local_model

VOCABULARY_MULTIPLE = 64
NOT_IN_FOLDERS = ("text_encoder", "text_tokens")
"""Model fields that a folder of diffusers does not state, and the recipe may."""


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
        return check_fp8(with_sample_tokens(check_texts(recipe.model_copy(update={"model": model}))))
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
    return resolve_lora(check_fp8(recipe))


def check_texts(recipe: Recipe) -> Recipe:
    """Return the recipe of a diffusion model; raise an error for captions and prompts that are too long for it."""
    assert isinstance(recipe.model, DiffusionModel)
    check_sample_prompts(recipe)
    if recipe.data.media is not None:
        check_captions(open_media_corpus(recipe), recipe.model)
    return recipe


def check_fp8(recipe: Recipe) -> Recipe:
    """Return the recipe; raise RecipeError for patterns of float8 layers without a layer."""
    if recipe.train.fp8 is not None:
        fp8_layers(recipe.model, recipe.train.fp8)
    return recipe


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
    corpus = open_data(recipe)
    return recipe.model_copy(update={"data": corpus.pinned(), "train": corpus.train()}), corpus.vocab_size


def open_data(recipe: Recipe) -> Corpus | MediaCorpus:
    """Open what a recipe trains on."""
    return open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)


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
    if RunFolder(folder).recipe_file.is_file():
        raise ModelError(
            f"model.init = {model.init!r} is the path of a run's folder",
            hint=f"give the run's name, {folder.resolve().name}, with --runs or HEADWAY_RUNS if it lies elsewhere",
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
