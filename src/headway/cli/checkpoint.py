"""`headway checkpoint ls | verify | show | diff | export | merge | import`: a run's checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.checkpoint_export import (
    export_adapters,
    export_weights,
    length_and_end,
    merge_of_folder,
    merge_of_run,
    record_folder,
    run_name_of,
    saved_recipe,
    tokenizer_file,
)
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
    saved_at,
    with_facts,
)
from headway.cli.options import Json, Runs, complete_run
from headway.cli.text import byte_size, plural, print_json
from headway.errors import DamagedState, StateError, UsageError
from headway.recipe.huggingface import read_model
from headway.state import find_checkpoint, open_checkpoint, verify_checkpoint
from headway.state.address import is_in_store, open_address, split_address
from headway.state.base_weights import base_weights
from headway.state.checkpoint_diff import diff_checkpoints
from headway.state.hf_import import import_run
from headway.state.huggingface import stored_weights, write_folder
from headway.state.object_store import open_store
from headway.state.peft import (
    is_adapter_folder,
    merged_weights,
)
from headway.state.store_checkpoint import owner_of
from headway.track import command, find_run, runs_root
from headway.track.hub import local_folder, local_model

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
    recipe = saved_recipe(opened, checkpoint)
    if recipe.lora is not None:
        export_adapters(folder, checkpoint, opened, recipe, recipe.lora, ema=ema, as_json=json)
    else:
        export_weights(folder, checkpoint, opened, recipe, ema=ema, as_json=json)


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
        merge = merge_of_folder(Path(source), base)
    elif base is None:
        merge = merge_of_run(find_named(source, runs))
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
        record_folder(folder, merge.checkpoint, open_address(merge.checkpoint.address), "merged into its base")
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
    name = name or run_name_of(folder)
    folder = local_folder(folder)
    model = read_model(folder)
    weights = stored_weights(folder, model)
    seq, end_id = length_and_end(folder)
    tokenizer = tokenizer_file(folder / "tokenizer.json", end_id)
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
