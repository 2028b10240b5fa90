"""`headway model show | diff | add-tokens | tag`: a model's parts and costs, the differences of two, names.

A model is a Hugging Face folder, a recipe, a run, a run's step, or the path of a checkpoint.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic_core import from_json

from headway.cli.checkpoint_view import progress_bar
from headway.cli.model_names import list_names, note_name, remove_named, tag_checkpoint
from headway.cli.model_view import NamedModel, diff_document, diff_lines, document_of, next_line, show_lines
from headway.cli.options import Json, Runs, Settings, complete_run
from headway.cli.text import print_json
from headway.data.chat_template import ChatTemplate, check_template
from headway.errors import HeadwayError, ModelError, StateError, UsageError
from headway.plan.model_summary import describe
from headway.recipe import Model, Recipe, load_recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.huggingface import model_from_config, read_config
from headway.recipe.sample_tokens import with_sample_tokens
from headway.recipe.upgrade import upgrade_recipe
from headway.state import find_checkpoint
from headway.state.added_tokens import add_tokens
from headway.state.address import open_address
from headway.state.base_weights import base_weights
from headway.state.checkpoint_diff import TensorDifference
from headway.state.huggingface import LazyWeight, saved_weights, stored_weights
from headway.state.peft import adapter_of_run, merged_weights
from headway.state.weight_diff import weight_differences
from headway.track import RunFolder, find_run, parse_ref, read_recipe, runs_root, split_ref
from headway.track.hub import local_model

app = typer.Typer(help="Show, compare, name and extend models.", no_args_is_help=True)

ASSUMED_VOCABULARY = 4096
"""Of a dataset that is not built yet: the default of `headway data build`."""
VOCABULARY_MULTIPLE = 64
"""As training rounds it; repeated here since importing the agent takes longer than this verb."""
USUAL_SEQ = 2048
"""Of a Hugging Face folder, which states the longest sequence only."""
Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]
WHAT = "A Hugging Face folder, a recipe, a run, RUN@STEP, or a checkpoint's path."


@app.command("show")
def show_command(
    what: Annotated[str, typer.Argument(metavar="FOLDER|RECIPE|RUN[@STEP]", help=WHAT)],
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, metavar="TOKENS", help="Sequence length (default: the model's).")
    ] = None,
    settings: Settings = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show a model's parameters, memory, FLOPs and KV cache."""
    named = _find_model(what, runs, settings)
    longest = named.model.longest
    if seq is not None and longest is not None and seq > longest:
        raise UsageError(f"--seq {seq} is too long: {what} has {longest} positions", hint=f"use {longest} or less")
    summary = describe(named.model, seq or named.seq, seq or named.longest, named.train, named.lora)
    stored, problems = _stored(named)
    notes = (*named.notes, *problems)
    document = document_of(named, summary, stored, _template(named.folder), notes)
    if json:
        print_json(document)
        return
    print("\n".join(show_lines(named.model, document)))
    if named.kind == "folder" and isinstance(named.model, DiffusionModel):
        print(f"next: a recipe with model.family = {named.model.family} and model.init = {what}")
    else:
        print(next_line(runs_root(runs), what, named.kind))


@app.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A", help=WHAT)],
    second: Annotated[str, typer.Argument(metavar="B", help=WHAT)],
    weights: Annotated[bool, typer.Option("--weights", help="Compare every value too; reads both completely.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare the fields, tensors and values of two models.

    Exits with 0 if they are the same, 1 if not, 2 if one of them cannot be read.
    """
    try:
        a, b = _find_model(first, runs), _find_model(second, runs)
        tensors = [_tensors(named) for named in (a, b)]
        values = _values(a, b, quiet=json) if weights else None
    except HeadwayError as error:  # exit status 1 is reserved for "they differ"
        raise UsageError(error.message, hint=error.hint) from None
    document = diff_document(a, b, tensors[0], tensors[1], values)
    if json:
        print_json(document)
    else:
        print("\n".join(diff_lines(runs_root(runs), document)))
    if not document["same"]:
        raise typer.Exit(1)


@app.command("add-tokens")
def add_tokens_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    tokens: Annotated[list[str], typer.Argument(metavar="TOKEN...", help="Special tokens, such as '<|im_end|>'.")],
    template: Annotated[
        Path | None, typer.Option("--template", metavar="FILE", help="Chat template for the new folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Copy a model with more special tokens and a chat template.

    The embedding of a new token is the mean of all others.
    """
    text = None
    if template is not None:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {template}: {error}", hint="--template names a jinja file") from None
        check_template(ChatTemplate(text), template)
    if not (folder / "config.json").is_file():
        raise _no_folder(folder)
    with progress_bar("weights", quiet=json) as progress:
        ids = add_tokens(folder, out, tokens, text, progress)
    if json:
        print_json({"folder": str(out), "tokens": dict(zip(tokens, ids, strict=True))})
        return
    named = ", ".join(f"{token} is {number}" for token, number in zip(tokens, ids, strict=True))
    print(f"{out}: {named}")
    print(f"next: headway data build OUT CHATS.jsonl --chat {out}")


@app.command("tag")
def tag_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]", autocompletion=complete_run, help="A run's checkpoint, or another model's name."
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name, such as prod.")],
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Also add a note.")] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Give a checkpoint a name, which every verb takes as a model.

    A name that is in use moves to the new checkpoint. A checkpoint with a name is not removed by checkpoint.keep_last.
    """
    tag_checkpoint(runs_root(runs), model, name, note, json)


@app.command("ls")
def ls_command(runs: Runs = None, json: Json = False) -> None:
    """List the names of models."""
    list_names(runs_root(runs), json)


@app.command("note")
def note_command(
    name: Name,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Add a note to a model's name."""
    note_name(runs_root(runs), name, text, json)


@app.command("remove", hidden=True)
@app.command("rm")
def remove_command(name: Name, runs: Runs = None, json: Json = False) -> None:
    """Remove a model's name; its checkpoint stays."""
    remove_named(runs_root(runs), name, json)


def _no_folder(folder: Path) -> UsageError:
    """Return what is wrong with a model that is no Hugging Face folder; a run must be exported first."""
    try:
        run = (
            RunFolder(folder)
            if (folder / "recipe.json").is_file()
            else find_run(runs_root(None), parse_ref(str(folder))[0])
        )
    except HeadwayError:
        what = f"{folder} has no config.json" if folder.is_dir() else f"there is no folder {folder}"
        return UsageError(what, hint="name a Hugging Face folder")
    return UsageError(
        f"{folder} is a run, not a Hugging Face folder", hint=f"export it: {run.command('checkpoint export', 'FOLDER')}"
    )


# -- find the model


def _find_model(what: str, runs: Path | None, settings: list[str] | None = None) -> NamedModel:
    """Return the model of a folder, a recipe, a run or a checkpoint."""
    path = Path(local_model(what))
    if (path.is_file() or path.suffix == ".toml") and path.name != "config.json":
        return _of_recipe(what, path, runs, settings or [])
    if settings:
        raise UsageError(f"--set needs a recipe, and {what} is not one", hint="headway model show RECIPE --set ...")
    if path.is_file():
        return _of_folder(what, path.parent)
    if "://" in what or (path / "manifest.json").exists():
        return _of_checkpoint(what, "checkpoint", what)
    if path.is_dir():
        return _of_folder(what, path)
    if "/" in what:
        raise UsageError(f"{what} not found", hint="give a folder with config.json, a recipe, or a run's name")
    return _of_run(what, runs)


def _of_folder(what: str, folder: Path) -> NamedModel:
    config = read_config(folder)
    model = model_from_config(config)
    positions = config.get("max_position_embeddings")
    if isinstance(model, DiffusionModel):
        return NamedModel(what, "folder", model, model.usual_tokens, model.usual_tokens, folder=folder)
    longest = model.longest or (positions if isinstance(positions, int) and positions > 0 else USUAL_SEQ)
    return NamedModel(what, "folder", model, min(longest, USUAL_SEQ), longest, folder=folder)


def _of_recipe(what: str, file: Path, runs: Path | None, settings: list[str]) -> NamedModel:
    recipe = load_recipe(file, settings)
    model, notes = recipe.model, tuple[str, ...]()
    if model.init is not None:
        from headway.agent.launch.resolve import resolve_model  # takes 0.35 s, and few recipes have model.init

        model = resolve_model(model, runs_root(runs))
    if isinstance(model, DiffusionModel):
        recipe = with_sample_tokens(recipe.model_copy(update={"model": model}))
    elif model.class_ is None and model.vocab_size is None:
        model, notes = with_vocabulary(model, Path(next(iter(recipe.data.parts.values())).path))
    return _trained(what, "recipe", recipe, model, notes=notes)


def with_vocabulary(model: Model, data: Path) -> tuple[Model, tuple[str, ...]]:
    """Return the model with the vocabulary of its dataset; with a default and a note if that is not built."""
    notes = tuple[str, ...]()
    try:
        size = int(from_json((data / "manifest.json").read_bytes())["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError):
        size = ASSUMED_VOCABULARY
        notes = (f"{data} is not built: assuming a vocabulary of {size:,} tokens",)
    rounded = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return model.model_copy(update={"vocab_size": rounded}), notes


def _of_run(what: str, runs: Path | None) -> NamedModel:
    name, step = split_ref(runs_root(runs), what)
    run = find_run(runs_root(runs), name)
    try:
        address = str(find_checkpoint(run.checkpoints, step))
    except StateError:
        if step is not None:
            raise
        recipe = read_recipe(run)
        return _trained(what, "run", recipe, recipe.model)
    return _of_checkpoint(what, "run", address)


def _of_checkpoint(what: str, kind: Literal["run", "checkpoint"], address: str) -> NamedModel:
    """Return the model of a checkpoint's recipe; old checkpoints have it in their run only."""
    saved = open_address(address).manifest.recipe
    recipe = upgrade_recipe(saved) if saved else read_recipe(RunFolder(Path(address).resolve().parent.parent))
    return _trained(what, kind, recipe, recipe.model, checkpoint=address)


def _trained(
    what: str,
    kind: Literal["recipe", "run", "checkpoint"],
    recipe: Recipe,
    model: Model,
    *,
    checkpoint: str | None = None,
    notes: tuple[str, ...] = (),
) -> NamedModel:
    if model.class_ is not None:
        raise ModelError(
            f"{what} trains a custom class, {model.class_}, whose parts are unknown",
            hint="headway checkpoint show RUN --tensors lists the saved tensors",
        )
    seq = recipe.data.seq
    return NamedModel(what, kind, model, seq, seq, recipe.train, checkpoint=checkpoint, notes=notes, lora=recipe.lora)


# -- weights and templates


def _weights(named: NamedModel) -> dict[str, LazyWeight] | None:
    """Return a model's weights by Headway's names, none of them read yet; None if it has none.

    Those of a run with adapters are merged.
    """
    if named.checkpoint is None and named.folder is None:
        return None
    if named.checkpoint is not None and named.lora is not None and named.model.init is not None:
        adapter = adapter_of_run(open_address(named.checkpoint), named.model, named.lora)
        return merged_weights(base_weights(named.model.init, named.model), adapter)
    if named.checkpoint is not None:
        shapes = named.model.tensors() | named.model.buffers()
        return saved_weights(open_address(named.checkpoint), shapes)
    assert named.folder is not None
    return stored_weights(named.folder, named.model) if any(named.folder.glob("*.safetensors*")) else None


def _stored(named: NamedModel) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the number of tensors and bytes by dtype; or a note if they do not match the model."""
    try:
        weights = _weights(named)
    except HeadwayError as error:
        return None, (error.message,)
    if weights is None:
        return None, ()
    dtypes: dict[str, int] = {}
    for weight in weights.values():
        dtypes[weight.dtype] = dtypes.get(weight.dtype, 0) + weight.bytes
    return {"tensors": len(weights), "bytes": sum(dtypes.values()), "dtypes": dtypes}, ()


def _template(folder: Path | None) -> dict[str, Any] | None:
    """Return a folder's chat template: its file, length and first line. It is never executed."""
    if folder is None:
        return None
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        text = _template_in(folder / name)
        if text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return {"file": name, "letters": len(text), "begins": lines[0] if lines else ""}
    return None


def _template_in(file: Path) -> str | None:
    """Return the template in a file; of several named ones, the default or the first."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        template = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


# -- compare two


def _tensors(named: NamedModel) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Return each tensor's shape, and its dtype if there are weights."""
    weights = _weights(named)
    if weights is None:
        return {name: (None, shape) for name, shape in (named.model.tensors() | named.model.buffers()).items()}
    return {name: (weight.dtype, weight.shape) for name, weight in weights.items()}


def _values(a: NamedModel, b: NamedModel, *, quiet: bool) -> list[TensorDifference]:
    """Return the differences of two models' weights."""
    first, second = _weights(a), _weights(b)
    if first is None or second is None:
        without = a if first is None else b
        raise UsageError(f"{without.name} has no weights to compare", hint="leave out --weights")
    with progress_bar("comparing", quiet=quiet) as progress:
        return weight_differences(first, second, progress)
