"""Checkpoints as Hugging Face folders and back: what `headway checkpoint export | merge | import` need."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from headway.cli.checkpoint_view import (
    progress_bar,
)
from headway.cli.named_checkpoints import (
    NamedCheckpoint,
    run_of,
)
from headway.cli.text import plural, print_json
from headway.errors import DataError, ModelError, StateError
from headway.recipe import Model, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.huggingface import read_model
from headway.recipe.lora import Lora
from headway.recipe.upgrade import upgrade_recipe
from headway.state import OpenCheckpoint
from headway.state.address import open_address
from headway.state.base_weights import base_digest, check_base
from headway.state.huggingface import TokenizerFile, saved_weights, write_folder
from headway.state.peft import (
    Adapter,
    adapter_of_run,
    base_of_adapter,
    check_same_base,
    read_adapter,
    write_adapter,
)
from headway.track import RunFolder, read_recipe
from headway.track.hub import is_hub, local_folder, parse_hub
from headway.track.lineage import record_export


def export_adapters(
    folder: Path,
    checkpoint: NamedCheckpoint,
    opened: OpenCheckpoint,
    recipe: Recipe,
    lora: Lora,
    *,
    ema: bool,
    as_json: bool,
) -> None:
    """Write the adapters of a checkpoint as a folder in PEFT's format, and print it."""
    adapter = adapter_of_run(opened, recipe.model, lora, prefix="ema/" if ema else "model/")
    write_adapter(folder, recipe.model, adapter)
    record_folder(folder, checkpoint, opened, "adapters exported", ema)
    if as_json:
        facts = {"step": opened.manifest.step, "layers": len(adapter.layers), "digest": opened.manifest.digest}
        print_json({"checkpoint": checkpoint.address, "folder": str(folder), "base": recipe.model.init, **facts})
        return
    print(f"{folder}: adapters of {checkpoint.label}, {plural(len(adapter.layers), 'layer')} of {recipe.model.init}")
    print(f"next: peft.PeftModel.from_pretrained(base, {str(folder)!r})")


def export_weights(
    folder: Path, checkpoint: NamedCheckpoint, opened: OpenCheckpoint, recipe: Recipe, *, ema: bool, as_json: bool
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, and print it."""
    shapes = recipe.model.tensors() | recipe.model.buffers()
    weights = saved_weights(opened, shapes)
    if ema:
        # frozen parameters have no average
        averaged = _averaged(opened)
        weights |= saved_weights(opened, {name: shapes[name] for name in shapes if name in averaged}, prefix="ema/")
    run = run_of(checkpoint)
    with progress_bar("exporting", quiet=as_json) as progress:
        write_folder(
            folder,
            recipe.model,
            {name: weights[name] for name in shapes},
            tokenizer=_tokenizer_of(run),
            sidecars=run.companions,
            seq=recipe.data.seq,
            progress=progress,
        )
    record_folder(folder, checkpoint, opened, "exported", ema)
    if as_json:
        facts = {"step": opened.manifest.step, "tensors": len(weights), "digest": opened.manifest.digest}
        print_json({"checkpoint": checkpoint.address, "folder": str(folder), **facts})
        return
    print(f"{folder}: {checkpoint.label}{', EMA weights' if ema else ''}, {plural(len(weights), 'tensor')}")
    print(f"next: {_loader(recipe)}.from_pretrained({str(folder)!r})")


def _loader(recipe: Recipe) -> str:
    """Return the class that reads a folder of a recipe's weights."""
    if isinstance(recipe.model, DiffusionModel):
        return f"diffusers.{recipe.model.to_config(0)['_class_name']}"
    return f"transformers.{'AutoModelForSequenceClassification' if recipe.model.reward else 'AutoModelForCausalLM'}"


def record_folder(
    folder: Path, checkpoint: NamedCheckpoint, opened: OpenCheckpoint, what: str, ema: bool = False
) -> None:
    """Record in a folder which checkpoint it is of, and in its run where the folder is; see `headway lineage`."""
    home = run_of(checkpoint)
    run = home if home.events.is_dir() else None
    facts = {"what": what, "step": opened.manifest.step, "digest": opened.manifest.digest, "ema": ema}
    record_export(folder, run, facts if run is not None else {**facts, "checkpoint": checkpoint.address})


class Merge(NamedTuple):
    """Adapters, their base, what a folder of the two needs, and the checkpoint that they are of."""

    label: str
    adapter: Adapter
    model: Model
    base: str
    tokenizer: TokenizerFile | None
    sidecars: Path
    seq: int
    checkpoint: NamedCheckpoint | None = None


def merge_of_run(checkpoint: NamedCheckpoint) -> Merge:
    """Return the adapters of a run, and the base in its recipe."""
    opened = open_address(checkpoint.address)
    recipe = saved_recipe(opened, checkpoint)
    if recipe.lora is None or recipe.model.init is None:
        raise StateError(
            f"{checkpoint.label} has no adapters: its recipe has no [lora]",
            hint="headway checkpoint export writes its weights",
            usage=True,
        )
    check_base(recipe.lora, recipe.model)
    adapter, run = adapter_of_run(opened, recipe.model, recipe.lora), run_of(checkpoint)
    return Merge(
        checkpoint.label,
        adapter,
        recipe.model,
        recipe.model.init,
        _tokenizer_of(run),
        run.companions,
        recipe.data.seq,
        checkpoint,
    )


def merge_of_folder(folder: Path, base: Path | None) -> Merge:
    """Return the adapters of a folder, and the base given or the one that it names."""
    base = base_of_adapter(folder) if base is None else local_folder(base)
    model = read_model(base)
    adapter = read_adapter(folder, model)
    if adapter.base is not None:
        check_same_base(adapter, base_digest(str(base), model), str(base))
    seq, end_id = length_and_end(base)
    tokenizer = tokenizer_file(base / "tokenizer.json", end_id)
    return Merge(str(folder), adapter, model, str(base), tokenizer, base, seq)


def _averaged(checkpoint: OpenCheckpoint) -> set[str]:
    """Return the parameters whose moving average a checkpoint has."""
    averaged = {name.removeprefix("ema/") for name in checkpoint.manifest.tensors if name.startswith("ema/")}
    if not averaged:
        raise StateError(
            f"{checkpoint.location} has no EMA weights",
            hint="set train.ema from the first step on, or leave out --ema",
            usage=True,
        )
    return averaged


def saved_recipe(checkpoint: OpenCheckpoint, named: NamedCheckpoint) -> Recipe:
    """Return the recipe that a checkpoint was saved with; raise if transformers has no such model."""
    saved = checkpoint.manifest.recipe
    try:
        recipe = upgrade_recipe(saved) if saved else read_recipe(run_of(named))
    except ValidationError:  # of a version with other keys; the run's own file may have been fixed
        recipe = read_recipe(run_of(named))
    if recipe.model.class_ is not None:
        raise ModelError(
            f"cannot export {recipe.model.class_}: only Headway's own decoders have a Hugging Face format",
            hint="checkpoint files are safetensors; headway.state.tensors.read_tensors reads whole tensors",
        )
    return recipe


def _tokenizer_of(run: RunFolder) -> TokenizerFile | None:
    """Return a run's tokenizer, with the end-of-text token of its data."""
    try:
        end_id = int(json.loads(run.data_file.read_bytes())["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError):
        return tokenizer_file(run.tokenizer_file, None)
    return tokenizer_file(run.tokenizer_file, end_id)


def tokenizer_file(path: Path, end_id: int | None) -> TokenizerFile | None:
    """Return a tokenizer.json, if it exists, with its end-of-text token: the one given, or one with a usual name."""
    if not path.exists():
        return None
    from headway.data.tokenizer import load_tokenizer  # loads the tokenizers library

    try:
        loaded = load_tokenizer(path, end_of_text=end_id)
    except DataError:  # without an end-of-text token it still encodes and decodes
        return TokenizerFile(path, end_id)
    return TokenizerFile(path, loaded.end_of_text, loaded.raw.id_to_token(loaded.end_of_text))


def length_and_end(folder: Path) -> tuple[int, int | None]:
    """Return the longest sequence of a Hugging Face model, and its end-of-text token."""
    config = json.loads((folder / "config.json").read_bytes())
    length, end = config.get("max_position_embeddings", config.get("n_positions")), config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return length if type(length) is int and length > 0 else 2048, end if type(end) is int else None


def run_name_of(folder: Path) -> str:
    """Return a run name made from a folder's name."""
    name = parse_hub(str(folder)).repo.rpartition("/")[2] if is_hub(str(folder)) else folder.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "imported"
