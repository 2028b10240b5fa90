"""`headway checkpoint ls | verify | show | diff | export | merge | import`: a run's checkpoints."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError

from headway.cli.checkpoint_view import (
    CountingSource,
    diff_lines,
    facts_of,
    list_lines,
    progress_bar,
    show_lines,
    tensor_rows,
)
from headway.cli.named_checkpoints import (
    STORE_PATIENCE_S,
    NamedCheckpoint,
    find_all_named,
    find_named,
    nothing_at,
    rows_at,
    rows_of_disk,
    rows_of_store,
    run_of,
    saved_at,
    with_facts,
)
from headway.cli.options import Json, Runs, complete_run
from headway.cli.text import byte_size, plural, print_json
from headway.errors import DamagedState, DataError, ModelError, StateError, UsageError
from headway.recipe import Model, Recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.huggingface import read_model
from headway.recipe.upgrade import upgrade_recipe
from headway.state import OpenCheckpoint, find_checkpoint, open_checkpoint, verify_checkpoint
from headway.state.address import is_in_store, open_address, split_address
from headway.state.base_weights import base_digest, base_weights, check_base
from headway.state.checkpoint_diff import diff_checkpoints
from headway.state.hf_import import import_run
from headway.state.huggingface import TokenizerFile, saved_weights, stored_weights, write_folder
from headway.state.object_store import open_store
from headway.state.peft import (
    Adapter,
    adapter_of_run,
    base_of_adapter,
    check_same_base,
    is_adapter_folder,
    merged_weights,
    read_adapter,
    write_adapter,
)
from headway.state.store_checkpoint import owner_of
from headway.track import RunFolder, command, find_run, read_recipe, runs_root
from headway.track.hub import is_hub, local_folder, local_model, parse_hub
from headway.track.lineage import record_export

app = typer.Typer(help="List, verify, compare, export, merge and import checkpoints.", no_args_is_help=True)

REF = "A run's name, a unique prefix of it or `last`, and a step; a checkpoint's path; or s3://bucket/RUN, and a step."
Ref = Annotated[str, typer.Argument(metavar="RUN[@STEP]", autocompletion=complete_run, help=REF)]


@app.command("ls")
def list_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|URL", autocompletion=complete_run, help="A run, or its address in a store: s3://bucket/RUN."
        ),
    ],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """List a run's checkpoints, oldest first."""
    if is_in_store(run):
        name, rows = run, with_facts(rows_at(run))
        if not rows and owner_of(open_store(split_address(run)[0], patience_s=STORE_PATIENCE_S)) is None:
            raise nothing_at(run)
    else:
        folder = find_run(runs_root(runs), run)
        name, rows = folder.name, [*rows_of_disk(folder), *with_facts(rows_of_store(folder))]
        rows.sort(key=lambda row: (int(row["step"]), row["tier"]))
    if json:
        print_json({"run": name, "checkpoints": rows})
    elif not rows:
        print(f"{name} has no checkpoint yet")
    else:
        print("\n".join(list_lines(rows)))
        print(f"next: {command(runs_root(runs), 'checkpoint verify', name)}")


@app.command("verify")
def verify_command(run: Ref, runs: Runs = None, json: Json = False) -> None:
    """Verify every byte of one checkpoint, or of all of a run's."""
    name, checkpoints = find_all_named(run, runs)
    results = [_verify(checkpoint, quiet=json) for checkpoint in checkpoints]
    damaged = [checkpoint.label for checkpoint, result in zip(checkpoints, results, strict=True) if not result["ok"]]
    if json:
        print_json({"run": name, "ok": not damaged, "checkpoints": results})
        raise typer.Exit(1 if damaged else 0)
    if "@" not in run and "/" not in run and (stored := rows_of_store(find_run(runs_root(runs), run))):
        verify = command(runs_root(runs), "checkpoint verify", f"{name}@STEP")
        print(f"note: {len(stored)} in the object store not read; use {verify}")
    if damaged:
        raise StateError(
            f"{len(damaged)} of {plural(len(results), 'checkpoint')} of {name} "
            f"{'is' if len(damaged) == 1 else 'are'} damaged: {', '.join(damaged)}",
            hint="headway resume uses the newest intact one; delete damaged ones to free their space",
        )


@app.command("show")
def show_command(
    run: Ref,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Show what a checkpoint contains."""
    checkpoint = find_named(run, runs)
    opened = open_address(checkpoint.address)
    facts = facts_of(opened) | {"saved": saved_at(Path(checkpoint.address))}
    table = tensor_rows(opened) if tensors else []
    if json:
        print_json({"path": checkpoint.address, **facts} | ({"tensors": table} if tensors else {}))
        return
    print("\n".join(show_lines(checkpoint.address, facts, table)))
    if not tensors:
        print(f"next: {command(runs_root(runs), 'checkpoint show', run, '--tensors')}")


@app.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A[@STEP]", autocompletion=complete_run, help=REF)],
    second: Annotated[str, typer.Argument(metavar="B[@STEP]", autocompletion=complete_run, help=REF)],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor.

    Exits with 0 if they are equal, 1 if not.
    """
    a, b = find_named(first, runs), find_named(second, runs)
    with progress_bar("comparing", quiet=json) as progress:
        difference = diff_checkpoints(open_address(a.address), open_address(b.address), progress)
    if json:
        print_json({"first": a.address, "second": b.address, **asdict(difference)})
    else:
        print("\n".join(diff_lines(a.label, b.label, difference)))
    if not difference.equal:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    run: Ref,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    ema: Annotated[bool, typer.Option("--ema", help="Export the exponential moving average (train.ema).")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Export a checkpoint's weights as a Hugging Face folder.

    Adapters (lora) become a folder in PEFT's format; headway checkpoint merge adds them to their base.
    """
    checkpoint = find_named(run, runs)
    opened = open_address(checkpoint.address)
    recipe = _recipe(opened, checkpoint)
    if recipe.lora is not None:
        adapter = adapter_of_run(opened, recipe.model, recipe.lora, prefix="ema/" if ema else "model/")
        write_adapter(folder, recipe.model, adapter)
        _record(folder, checkpoint, opened, "adapters exported", ema)
        facts = {"step": opened.manifest.step, "layers": len(adapter.layers), "digest": opened.manifest.digest}
        if json:
            print_json({"checkpoint": checkpoint.address, "folder": str(folder), "base": recipe.model.init, **facts})
        else:
            print(
                f"{folder}: adapters of {checkpoint.label}, "
                f"{plural(len(adapter.layers), 'layer')} of {recipe.model.init}"
            )
            print(f"next: peft.PeftModel.from_pretrained(base, {str(folder)!r})")
        return
    shapes = recipe.model.tensors() | recipe.model.buffers()
    weights = saved_weights(opened, shapes)
    if ema:
        # frozen parameters have no average
        averaged = _averaged(opened)
        weights |= saved_weights(opened, {name: shapes[name] for name in shapes if name in averaged}, prefix="ema/")
    ordered = {name: weights[name] for name in shapes}
    tokenizer = _tokenizer_of(run_of(checkpoint))
    with progress_bar("exporting", quiet=json) as progress:
        write_folder(
            folder,
            recipe.model,
            ordered,
            tokenizer=tokenizer,
            sidecars=run_of(checkpoint).companions,
            seq=recipe.data.seq,
            progress=progress,
        )
    _record(folder, checkpoint, opened, "exported", ema)
    manifest = opened.manifest
    if json:
        facts = {"step": manifest.step, "tensors": len(weights), "digest": manifest.digest}
        print_json({"checkpoint": checkpoint.address, "folder": str(folder), **facts})
    else:
        print(f"{folder}: {checkpoint.label}{', EMA weights' if ema else ''}, {plural(len(weights), 'tensor')}")
        auto = "AutoModelForSequenceClassification" if recipe.model.reward else "AutoModelForCausalLM"
        if isinstance(recipe.model, DiffusionModel):
            print(f"next: diffusers.{recipe.model.to_config(0)['_class_name']}.from_pretrained({str(folder)!r})")
        else:
            print(f"next: transformers.{auto}.from_pretrained({str(folder)!r})")


@app.command("merge")
def merge_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|ADAPTER",
            autocompletion=complete_run,
            help="A run with adapters and a step, or a folder of adapters in PEFT's format, or hf:org/name.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", metavar="FOLDER", help="Base of a folder of adapters (default: the one it names), or hf:org/name."
        ),
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Merge adapters (lora) into their base, as a Hugging Face folder."""
    source = local_model(source)
    if is_adapter_folder(Path(source)):
        merge = _merge_of_folder(Path(source), base)
    elif base is None:
        merge = _merge_of_run(find_named(source, runs))
    else:
        raise UsageError("--base is for a folder of adapters: a run knows its base", hint="leave --base out")
    weights = merged_weights(base_weights(merge.base, merge.model), merge.adapter)
    with progress_bar("merging", quiet=json) as progress:
        write_folder(
            folder,
            merge.model,
            weights,
            tokenizer=merge.tokenizer,
            sidecars=merge.sidecars,
            seq=merge.seq,
            progress=progress,
        )
    if merge.checkpoint is not None:
        _record(folder, merge.checkpoint, open_address(merge.checkpoint.address), "merged into its base")
    if json:
        facts = {"base": merge.base, "layers": len(merge.adapter.layers), "tensors": len(weights)}
        print_json({"adapter": merge.adapter.name, "folder": str(folder), **facts})
    else:
        print(
            f"{folder}: {plural(len(merge.adapter.layers), 'layer')} of {merge.base} with the adapters of {merge.label}"
        )
        print(f"next: headway serve {folder}")


@app.command("import")
def import_command(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with config.json and *.safetensors, or hf:org/name.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="RUN", help="Name of the new run (default: the folder's name).")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Import a Hugging Face folder as a run.

    Sample from it, export it, or start other runs from it with model.init.
    """
    name = name or _run_name(folder)
    folder = local_folder(folder)
    model = read_model(folder)
    weights = stored_weights(folder, model)
    seq, end_id = _length_and_end(folder)
    tokenizer = _tokenizer_file(folder / "tokenizer.json", end_id)
    source = str(folder.resolve())
    with progress_bar("importing", quiet=json) as progress:
        run_folder = import_run(
            runs_root(runs),
            name,
            model,
            weights,
            source=source,
            seq=seq,
            tokenizer=tokenizer,
            sidecars=folder,
            progress=progress,
        )
    manifest = open_checkpoint(find_checkpoint(run_folder.checkpoints)).manifest
    if json:
        facts = {"step": manifest.step, "tensors": len(weights), "bytes": manifest.bytes, "digest": manifest.digest}
        print_json({"run": run_folder.name, "path": str(run_folder.path), **facts, "tokenizer": tokenizer is not None})
        return
    print(
        f"{run_folder.name}: {plural(len(weights), 'tensor')}, "
        f"{byte_size(manifest.bytes)}, digest {manifest.digest[:16]}"
    )
    if tokenizer is None or tokenizer.end_id is None:
        what = "no tokenizer.json" if tokenizer is None else "no known end-of-text token"
        print(f"note: {folder} has {what}, which headway sample needs")
        print(f"next: {run_folder.command('checkpoint show')}")
    else:
        print(f"next: {run_folder.command('sample')}")


def _verify(checkpoint: NamedCheckpoint, quiet: bool) -> dict[str, Any]:
    """Verify a checkpoint and print the result."""
    try:
        with progress_bar(checkpoint.label, quiet=quiet) as progress:
            opened = open_address(checkpoint.address)
            verified = verify_checkpoint(CountingSource(opened.source, progress))
    except StateError as error:
        if is_in_store(checkpoint.address) and not isinstance(error, DamagedState):
            raise  # missing or no answer: not damage
        line, result = error.message, {"step": checkpoint.step, "ok": False, "damage": error.message}
    else:
        workers = opened.manifest.workers
        sizes = f"{plural(workers, 'worker')}, {plural(verified.tensors, 'tensor')}, {byte_size(verified.bytes)}"
        line, result = (
            f"ok, {sizes}, digest {verified.digest[:16]}",
            {"ok": True, **asdict(verified), "workers": workers},
        )
    if not quiet:
        print(f"{checkpoint.label}: {line}", flush=True)
    return {"path": checkpoint.address, **result}


# -- export, merge and import


def _record(folder: Path, checkpoint: NamedCheckpoint, opened: OpenCheckpoint, what: str, ema: bool = False) -> None:
    """Record in a folder which checkpoint it is of, and in its run where the folder is; see `headway lineage`."""
    home = run_of(checkpoint)
    run = home if home.events.is_dir() else None
    facts = {"what": what, "step": opened.manifest.step, "digest": opened.manifest.digest, "ema": ema}
    record_export(folder, run, facts if run is not None else {**facts, "checkpoint": checkpoint.address})


class _Merge(NamedTuple):
    """Adapters, their base, what a folder of the two needs, and the checkpoint that they are of."""

    label: str
    adapter: Adapter
    model: Model
    base: str
    tokenizer: TokenizerFile | None
    sidecars: Path
    seq: int
    checkpoint: NamedCheckpoint | None = None


def _merge_of_run(checkpoint: NamedCheckpoint) -> _Merge:
    opened = open_address(checkpoint.address)
    recipe = _recipe(opened, checkpoint)
    if recipe.lora is None or recipe.model.init is None:
        raise StateError(
            f"{checkpoint.label} has no adapters: its recipe has no [lora]",
            hint="headway checkpoint export writes its weights",
            usage=True,
        )
    check_base(recipe.lora, recipe.model)
    adapter, run = adapter_of_run(opened, recipe.model, recipe.lora), run_of(checkpoint)
    return _Merge(
        checkpoint.label,
        adapter,
        recipe.model,
        recipe.model.init,
        _tokenizer_of(run),
        run.companions,
        recipe.data.seq,
        checkpoint,
    )


def _merge_of_folder(folder: Path, base: Path | None) -> _Merge:
    base = base_of_adapter(folder) if base is None else local_folder(base)
    model = read_model(base)
    adapter = read_adapter(folder, model)
    if adapter.base is not None:
        check_same_base(adapter, base_digest(str(base), model), str(base))
    seq, end_id = _length_and_end(base)
    tokenizer = _tokenizer_file(base / "tokenizer.json", end_id)
    return _Merge(str(folder), adapter, model, str(base), tokenizer, base, seq)


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


def _recipe(checkpoint: OpenCheckpoint, named: NamedCheckpoint) -> Recipe:
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
        return _tokenizer_file(run.tokenizer_file, None)
    return _tokenizer_file(run.tokenizer_file, end_id)


def _tokenizer_file(path: Path, end_id: int | None) -> TokenizerFile | None:
    """Return a tokenizer.json, if it exists, with its end-of-text token: the one given, or one with a usual name."""
    if not path.exists():
        return None
    from headway.data.tokenizer import load_tokenizer  # loads the tokenizers library

    try:
        loaded = load_tokenizer(path, end_of_text=end_id)
    except DataError:  # without an end-of-text token it still encodes and decodes
        return TokenizerFile(path, end_id)
    return TokenizerFile(path, loaded.end_of_text, loaded.raw.id_to_token(loaded.end_of_text))


def _length_and_end(folder: Path) -> tuple[int, int | None]:
    """Return the longest sequence of a Hugging Face model, and its end-of-text token."""
    config = json.loads((folder / "config.json").read_bytes())
    length, end = config.get("max_position_embeddings", config.get("n_positions")), config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return length if type(length) is int and length > 0 else 2048, end if type(end) is int else None


def _run_name(folder: Path) -> str:
    """Return a run name made from a folder's name."""
    name = parse_hub(str(folder)).repo.rpartition("/")[2] if is_hub(str(folder)) else folder.resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "imported"
