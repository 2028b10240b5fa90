"""`headway model show | diff`: what a model is made of and what it takes; and in what two of them differ.

A model is named by a Hugging Face folder, a recipe, a run, a run's step, or where a checkpoint lies.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cli.options import Json, Runs, Settings

if TYPE_CHECKING:
    from headway.recipe import Model, Recipe, Train
    from headway.state.checkpoint_diff import TensorDifference
    from headway.state.huggingface import LazyWeight

__all__ = ["app"]

app = typer.Typer(help="Show what a model is made of, or compare two.", no_args_is_help=True)

ASSUMED_VOCABULARY = 4096
"""Of a tokenizer that is not built yet: the default of `headway data build`."""
VOCABULARY_MULTIPLE = 64
"""As training rounds it; kept here since the agent's imports take longer than this verb."""
USUAL_SEQ = 2048
"""Of a folder, which says how long sequences may be and not how long they usually are."""
WHAT = "A Hugging Face folder, a recipe, a run, RUN@STEP, or where a checkpoint lies."


@dataclass(frozen=True)
class NamedModel:
    """A model that the command line names."""

    name: str
    """As it was typed."""
    kind: Literal["folder", "recipe", "run", "checkpoint"]
    model: "Model"
    seq: int
    """Tokens of a sequence in training."""
    longest: int
    """Tokens of the longest sequence that it is meant for."""
    train: "Train | None" = None
    folder: Path | None = None
    checkpoint: str | None = None
    """Where its weights are: in a folder, at a checkpoint's address, or nowhere yet."""
    notes: tuple[str, ...] = ()


@app.command("show")
def show_command(
    what: Annotated[str, typer.Argument(metavar="FOLDER|RECIPE|RUN[@STEP]", help=WHAT)],
    seq: Annotated[
        int | None, typer.Option("--seq", min=1, metavar="TOKENS", help="Length of sequences (default: the model's).")
    ] = None,
    settings: Settings = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print a model's family, shape, parameters by part, and what it takes in memory, operations and cache."""
    from headway.cli.model_view import document_of, next_line, show_lines
    from headway.cli.text import print_json
    from headway.errors import UsageError
    from headway.plan.model_summary import describe

    subject = _subject(what, runs, settings)
    longest = subject.model.longest
    if seq is not None and longest is not None and seq > longest:
        raise UsageError(f"--seq is {seq}, and {what} has positions for {longest}", hint=f"{longest} at most")
    found = describe(subject.model, seq or subject.seq, seq or subject.longest, subject.train)
    stored, trouble = _stored(subject)
    notes = (*subject.notes, *trouble)
    document = document_of(subject, found, stored, _template(subject.folder), notes)
    if json:
        print_json(document)
        return
    print("\n".join(show_lines(subject.model, document)))
    print(next_line(what, subject.kind))


@app.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A", help=WHAT)],
    second: Annotated[str, typer.Argument(metavar="B", help=WHAT)],
    weights: Annotated[bool, typer.Option("--weights", help="Compare every value, too; reads all of both.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two models: their fields, their tensors, and with --weights their values.

    Exit status 0 when they are the same, 1 when not, 2 when one of them cannot be read.
    """
    from headway.cli.model_view import diff_document, diff_lines
    from headway.cli.text import print_json
    from headway.errors import HeadwayError, UsageError

    try:
        a, b = _subject(first, runs), _subject(second, runs)
        tensors = [_tensors(one) for one in (a, b)]
        values = _values(a, b, quiet=json) if weights else None
    except HeadwayError as error:  # 1 says that they differ, and nothing else
        raise UsageError(error.message, hint=error.hint) from None
    document = diff_document(a, b, tensors[0], tensors[1], values)
    if json:
        print_json(document)
    else:
        print("\n".join(diff_lines(document)))
    if not document["same"]:
        raise typer.Exit(1)


# -- which model is meant


def _subject(what: str, runs: Path | None, settings: list[str] | None = None) -> NamedModel:
    """The model that a folder, a recipe, a run or a checkpoint has."""
    from headway.errors import UsageError

    path = Path(what)
    if (path.is_file() or path.suffix == ".toml") and path.name != "config.json":
        return _of_recipe(what, path, runs, settings or [])
    if settings:
        raise UsageError(f"--set changes a recipe, and {what} is none", hint="headway model show RECIPE --set ...")
    if path.is_file():
        return _of_folder(what, path.parent)
    if "://" in what or (path / "manifest.json").exists():
        return _of_checkpoint(what, "checkpoint", what)
    if path.is_dir():
        return _of_folder(what, path)
    if "/" in what:
        raise UsageError(f"there is no {what}", hint="a folder with config.json, a recipe, or a run's name")
    return _of_run(what, runs)


def _of_folder(what: str, folder: Path) -> NamedModel:
    from headway.recipe.huggingface import model_from_config, read_config

    config = read_config(folder)
    model = model_from_config(config)
    said = config.get("max_position_embeddings")
    longest = model.longest or (said if isinstance(said, int) and said > 0 else USUAL_SEQ)
    return NamedModel(what, "folder", model, min(longest, USUAL_SEQ), longest, folder=folder)


def _of_recipe(what: str, file: Path, runs: Path | None, settings: list[str]) -> NamedModel:
    from headway.recipe import load_recipe

    recipe = load_recipe(file, settings)
    model, notes = recipe.model, tuple[str, ...]()
    if model.init is not None:
        from headway.agent.launch.prepare import resolve_model
        from headway.track import runs_root

        model = resolve_model(model, runs_root(runs))
    if model.class_ is None and model.vocab_size is None:
        model, notes = _with_vocabulary(model, Path(next(iter(recipe.data.parts.values())).path))
    return _trained(what, "recipe", recipe, model, notes=notes)


def _with_vocabulary(model: "Model", data: Path) -> "tuple[Model, tuple[str, ...]]":
    """The size that training would give the vocabulary, if the data are there; a guess and a note otherwise."""
    from pydantic_core import from_json

    notes = tuple[str, ...]()
    try:
        size = int(from_json((data / "manifest.json").read_bytes())["vocab_size"])
    except (OSError, ValueError, TypeError, KeyError):
        size = ASSUMED_VOCABULARY
        notes = (f"{data} is not built: a vocabulary of {size:,} tokens is assumed",)
    rounded = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return model.model_copy(update={"vocab_size": rounded}), notes


def _of_run(what: str, runs: Path | None) -> NamedModel:
    from headway.errors import StateError
    from headway.state import find_checkpoint
    from headway.track import find_run, parse_ref, read_recipe, runs_root

    name, step = parse_ref(what)
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
    """The recipe that a checkpoint was saved with; older ones have it in their run only."""
    from headway.recipe.upgrade import upgrade_recipe
    from headway.state.address import open_address
    from headway.track import RunFolder, read_recipe

    said = open_address(address).manifest.recipe
    recipe = upgrade_recipe(said) if said else read_recipe(RunFolder(Path(address).resolve().parent.parent))
    return _trained(what, kind, recipe, recipe.model, checkpoint=address)


def _trained(
    what: str,
    kind: Literal["recipe", "run", "checkpoint"],
    recipe: "Recipe",
    model: "Model",
    *,
    checkpoint: str | None = None,
    notes: tuple[str, ...] = (),
) -> NamedModel:
    from headway.errors import ModelError

    if model.class_ is not None:
        raise ModelError(
            f"{what} trains {model.class_}, a class of your own: what it is made of, only it can say",
            hint="headway checkpoint show RUN --tensors lists the tensors of what was saved",
        )
    seq = recipe.data.seq
    return NamedModel(what, kind, model, seq, seq, recipe.train, checkpoint=checkpoint, notes=notes)


# -- what lies beside it


def _weights(subject: NamedModel) -> "dict[str, LazyWeight] | None":
    """A model's weights by our names, none of them read yet; None where there are none."""
    if subject.checkpoint is None and subject.folder is None:
        return None
    from headway.state.address import open_address
    from headway.state.huggingface import saved_weights, stored_weights

    if subject.checkpoint is not None:
        shapes = subject.model.tensors() | subject.model.buffers()
        return saved_weights(open_address(subject.checkpoint), shapes)
    assert subject.folder is not None
    return stored_weights(subject.folder, subject.model) if any(subject.folder.glob("*.safetensors*")) else None


def _stored(subject: NamedModel) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """How many tensors and bytes of which dtypes there are; a note where they are not this model's."""
    from headway.errors import HeadwayError

    try:
        weights = _weights(subject)
    except HeadwayError as error:
        return None, (error.message,)
    if weights is None:
        return None, ()
    dtypes: dict[str, int] = {}
    for weight in weights.values():
        dtypes[weight.dtype] = dtypes.get(weight.dtype, 0) + weight.bytes
    return {"tensors": len(weights), "bytes": sum(dtypes.values()), "dtypes": dtypes}, ()


def _template(folder: Path | None) -> dict[str, Any] | None:
    """A folder's chat template: which file has it, how long it is, how it begins. It is never executed."""
    if folder is None:
        return None
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        text = _template_in(folder / name)
        if text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return {"file": name, "letters": len(text), "begins": lines[0] if lines else ""}
    return None


def _template_in(file: Path) -> str | None:
    """The template that a file is or has; of several that have names, the first or the default."""
    import json

    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        found = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None


# -- two of them


def _tensors(subject: NamedModel) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Every tensor's dtype, where there are weights, and its shape."""
    weights = _weights(subject)
    if weights is None:
        return {name: (None, shape) for name, shape in (subject.model.tensors() | subject.model.buffers()).items()}
    return {name: (weight.dtype, weight.shape) for name, weight in weights.items()}


def _values(a: NamedModel, b: NamedModel, *, quiet: bool) -> "list[TensorDifference]":
    """How far apart the values of two models' tensors are."""
    from headway.cli.checkpoint_view import progress_bar
    from headway.errors import UsageError
    from headway.state.weight_diff import weight_differences

    first, second = _weights(a), _weights(b)
    if first is None or second is None:
        bare = a if first is None else b
        raise UsageError(f"{bare.name} has no weights to compare", hint="leave out --weights")
    with progress_bar("comparing", quiet=quiet) as progress:
        return weight_differences(first, second, progress)
