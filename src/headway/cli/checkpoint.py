"""`headway checkpoint ls | verify | show | diff | export | import`: what was saved, if it is whole, in and out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headway.cli.options import Json, Runs

if TYPE_CHECKING:
    from headway.recipe import Recipe
    from headway.state import OpenCheckpoint
    from headway.state.huggingface import TokenizerFile
    from headway.track import RunFolder

__all__ = ["app"]

app = typer.Typer(help="List, verify, show, compare, export and import checkpoints.", no_args_is_help=True)

STORE_PATIENCE_S = 10.0
REF = "A run's name, a unique prefix of it, or `last`, and a step; or where a checkpoint lies."
Ref = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help=REF)]


class NamedCheckpoint(NamedTuple):
    """A checkpoint that the command line names."""

    label: str
    step: int | None
    address: str
    """A folder, or a place in an object store."""


@app.command("ls")
def list_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN|URL", help="A run, or the url of one in an object store (s3://bucket/RUN).")
    ],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """List a run's checkpoints, oldest first."""
    from headway.cli.checkpoint_view import list_lines
    from headway.cli.text import print_json
    from headway.state.address import is_in_store
    from headway.track import find_run, runs_root

    if is_in_store(run):
        name, rows = run, _rows_at(run.rstrip("/"))
    else:
        folder = find_run(runs_root(runs), run)
        name, rows = folder.name, _rows(folder)
    if json:
        print_json({"run": name, "checkpoints": rows})
    elif not rows:
        print(f"{name} has no checkpoint yet")
    else:
        print("\n".join(list_lines(rows)))
        print(f"next: headway checkpoint {'show ' + rows[-1]['path'] if is_in_store(run) else 'verify ' + name}")


@app.command("verify")
def verify_command(run: Ref, runs: Runs = None, json: Json = False) -> None:
    """Read checkpoints back and check every byte: the one of a step, or all that the run has."""
    from headway.cli.text import print_json
    from headway.errors import StateError
    from headway.track import find_run, runs_root

    name, wanted = _all_of(run, runs)
    results = [_verify(one, quiet=json) for one in wanted]
    damaged = [one.label for one, result in zip(wanted, results, strict=True) if not result["ok"]]
    if json:
        print_json({"run": name, "ok": not damaged, "checkpoints": results})
        raise typer.Exit(1 if damaged else 0)
    if "@" not in run and "/" not in run and (stored := _rows_of_store(find_run(runs_root(runs), run))):
        print(f"note: {len(stored)} in the object store were not read; headway checkpoint verify {name}@STEP does")
    if damaged:
        raise StateError(
            f"{len(damaged)} of {len(results)} checkpoints of {name} damaged: {', '.join(damaged)}",
            hint="headway resume takes the newest that is whole; remove what is damaged to have its space back",
        )


@app.command("show")
def show_command(
    run: Ref,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, too.")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Print what a checkpoint holds."""
    from headway.cli.checkpoint_view import facts_of, show_lines, tensor_rows
    from headway.cli.text import print_json
    from headway.state.address import open_address

    one = _one(run, runs)
    opened = open_address(one.address)
    facts = facts_of(opened) | {"saved": _saved(Path(one.address))}
    table = tensor_rows(opened) if tensors else []
    if json:
        print_json({"path": one.address, **facts} | ({"tensors": table} if tensors else {}))
        return
    print("\n".join(show_lines(one.address, facts, table)))
    if not tensors:
        print(f"next: headway checkpoint show {run} --tensors")


@app.command("diff")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A[@STEP]", help=REF)],
    second: Annotated[str, typer.Argument(metavar="B[@STEP]", help=REF)],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Compare two checkpoints, tensor by tensor where their digests differ.

    Exit status 0 when they are equal, 1 when not.
    """
    from dataclasses import asdict

    from headway.cli.checkpoint_view import diff_lines, progress_bar
    from headway.cli.text import print_json
    from headway.state.address import open_address
    from headway.state.checkpoint_diff import diff_checkpoints

    a, b = _one(first, runs), _one(second, runs)
    with progress_bar("comparing", quiet=json) as progress:
        found = diff_checkpoints(open_address(a.address), open_address(b.address), progress)
    if json:
        print_json({"first": a.address, "second": b.address, **asdict(found)})
    else:
        print("\n".join(diff_lines(a.label, b.label, found)))
    if not found.equal:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    run: Ref,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.")],
    ema: Annotated[bool, typer.Option("--ema", help="The weights' average over the steps (train.ema).")] = False,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder that transformers opens."""
    from headway.cli.checkpoint_view import progress_bar
    from headway.cli.text import print_json
    from headway.state.address import open_address
    from headway.state.huggingface import saved_weights, write_folder

    one = _one(run, runs)
    opened = open_address(one.address)
    recipe = _recipe(opened, one)
    shapes = recipe.model.tensors() | recipe.model.buffers()
    weights = saved_weights(opened, shapes)
    if ema:
        # what is not trained has no average, and is its own
        averaged = _averaged(opened)
        weights |= saved_weights(opened, {name: shapes[name] for name in shapes if name in averaged}, prefix="ema/")
    ordered = {name: weights[name] for name in shapes}
    tokenizer = _tokenizer_of(_home(one))
    with progress_bar("exporting", quiet=json) as progress:
        write_folder(
            folder,
            recipe.model,
            ordered,
            tokenizer=tokenizer,
            sidecars=_home(one).companions,
            seq=recipe.data.seq,
            progress=progress,
        )
    manifest = opened.manifest
    if json:
        facts = {"step": manifest.step, "tensors": len(weights), "digest": manifest.digest}
        print_json({"checkpoint": one.address, "folder": str(folder), **facts})
    else:
        print(f"{folder}: {one.label}{', its average' if ema else ''}, {len(weights)} tensors")
        print(f"next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


@app.command("import")
def import_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with config.json and *.safetensors.")],
    name: Annotated[str | None, typer.Option("--name", metavar="RUN", help="Name of the run to make.")] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Make a run of a Hugging Face folder: to sample from, to export, or to start from (model.init)."""
    from headway.cli.checkpoint_view import progress_bar, size
    from headway.cli.text import print_json
    from headway.recipe.huggingface import read_model
    from headway.state import find_checkpoint, open_checkpoint
    from headway.state.hf_import import import_run
    from headway.state.huggingface import stored_weights
    from headway.track import runs_root

    model = read_model(folder)
    weights = stored_weights(folder, model)
    seq, end_id = _length_and_end(folder)
    tokenizer = _tokenizer_file(folder / "tokenizer.json", end_id)
    source = str(folder.resolve())
    with progress_bar("importing", quiet=json) as progress:
        made = import_run(
            runs_root(runs),
            name or _run_name(folder),
            model,
            weights,
            source=source,
            seq=seq,
            tokenizer=tokenizer,
            sidecars=folder,
            progress=progress,
        )
    manifest = open_checkpoint(find_checkpoint(made.checkpoints)).manifest
    if json:
        facts = {"step": manifest.step, "tensors": len(weights), "bytes": manifest.bytes, "digest": manifest.digest}
        print_json({"run": made.name, "path": str(made.path), **facts, "tokenizer": tokenizer is not None})
        return
    print(f"{made.name}: {len(weights)} tensors, {size(manifest.bytes)}, digest {manifest.digest[:16]}")
    if tokenizer is None or tokenizer.end_id is None:
        what = "no tokenizer.json" if tokenizer is None else "no token that is known to end a text"
        print(f"note: {folder} has {what}, which headway sample needs")
        print(f"next: headway checkpoint show {made.name}")
    else:
        print(f"next: headway sample {made.name}")


# -- which checkpoints are meant


def _one(ref: str, runs: Path | None) -> NamedCheckpoint:
    """The checkpoint of a run's step, a run's newest, or the one that lies there."""
    from headway.errors import UsageError
    from headway.state import find_checkpoint, list_checkpoints
    from headway.state.address import is_in_store
    from headway.track import find_run, parse_ref, runs_root

    if "/" in ref:
        if not is_in_store(ref) and not Path(ref).is_dir():
            raise UsageError(f"there is no folder {ref}", hint="a run is named by its name alone: headway runs")
        return NamedCheckpoint(ref, None, ref)
    name, step = parse_ref(ref)
    folder = find_run(runs_root(runs), name)
    if stored := _in_store(folder, step):
        return stored
    path = find_checkpoint(folder.checkpoints, step)
    found = next(entry.step for entry in list_checkpoints(folder.checkpoints) if entry.path == path)
    return NamedCheckpoint(f"step {found} of {folder.name}", found, str(path))


def _all_of(ref: str, runs: Path | None) -> tuple[str, list[NamedCheckpoint]]:
    """What a reference is called, and its checkpoint, or all of the run's where it names no step."""
    from headway.state import find_checkpoint, list_checkpoints
    from headway.track import find_run, parse_ref, runs_root

    if "/" in ref:
        return ref, [_one(ref, runs)]
    name, step = parse_ref(ref)
    folder = find_run(runs_root(runs), name)
    if stored := _in_store(folder, step):
        return folder.name, [stored]
    newest = find_checkpoint(folder.checkpoints, step)
    entries = [entry for entry in list_checkpoints(folder.checkpoints) if step is None or entry.path == newest]
    return folder.name, [NamedCheckpoint(f"step {entry.step}", entry.step, str(entry.path)) for entry in entries]


def _in_store(folder: "RunFolder", step: int | None) -> NamedCheckpoint | None:
    """A step, or without one the newest, of a run whose disk does not have it."""
    from headway.state import list_checkpoints

    here = [entry.step for entry in list_checkpoints(folder.checkpoints)]
    if (step is None and here) or step in here:
        return None
    rows = [row for row in _rows_of_store(folder) if step in (None, row["step"]) and "damage" not in row]
    return (
        NamedCheckpoint(f"step {rows[-1]['step']} in the store", rows[-1]["step"], rows[-1]["path"]) if rows else None
    )


def _home(one: NamedCheckpoint) -> "RunFolder":
    """The run that a checkpoint lies in."""
    from headway.track import RunFolder

    return RunFolder(Path(one.address).resolve().parent.parent)


# -- ls and verify


def _rows(run: "RunFolder") -> list[dict[str, Any]]:
    """A row for each checkpoint, oldest first; each tier that has some adds its own here."""
    return sorted([*_rows_of_disk(run), *_rows_of_store(run)], key=lambda row: (int(row["step"]), row["tier"]))


def _rows_of_store(run: "RunFolder") -> list[dict[str, Any]]:
    """What the run's object store has; one row with the trouble where it cannot be asked."""
    from headway.errors import HeadwayError
    from headway.state.address import store_url
    from headway.track import read_recipe

    rules = read_recipe(run).checkpoint.store if run.recipe_file.exists() else None
    if rules is None:
        return []
    try:
        return _rows_at(store_url(rules, run.name))
    except HeadwayError as error:
        return [{"step": -1, "tier": "store", "path": store_url(rules, run.name), "damage": error.message}]


def _rows_at(url: str) -> list[dict[str, Any]]:
    """What lies at the url of a run in an object store, by its listing alone."""
    from headway.state.address import address_in_store
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import list_remote

    return [
        {
            "step": entry.step,
            "tier": "store",
            "path": address_in_store(url, entry.step),
            "bytes": entry.bytes,
            "saved": entry.saved.timestamp(),
        }
        for entry in list_remote(open_store(url, patience_s=STORE_PATIENCE_S))
    ]


def _rows_of_disk(run: "RunFolder") -> list[dict[str, Any]]:
    """What the manifests say; a damaged one is listed too, with what is wrong."""
    from headway.errors import StateError
    from headway.state import list_checkpoints, open_checkpoint

    rows = []
    seen: set[tuple[int, int]] = set()
    for entry in list_checkpoints(run.checkpoints):
        row: dict[str, Any] = {"step": entry.step, "tier": "disk", "path": str(entry.path)}
        try:
            opened = open_checkpoint(entry.path)
            row |= _describe(opened) | {"saved": _saved(entry.path), "shared_bytes": _shared(opened, entry.path, seen)}
        except StateError as error:
            row |= {"damage": error.message}
        rows.append(row)
    return rows


def _describe(checkpoint: "OpenCheckpoint") -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "bytes": manifest.bytes,
        "tensors": len(manifest.tensors),
        "workers": manifest.workers,
        "cursor": manifest.cursor,
        "chain": manifest.chain,
        "digest": manifest.digest,
    }


def _shared(checkpoint: "OpenCheckpoint", path: Path, seen: set[tuple[int, int]]) -> int:
    """Bytes of files that have a second name in one of the checkpoints seen before: they are on the disk once."""
    shared = 0
    for name in checkpoint.manifest.files:
        found = (path / name).stat()
        shared += found.st_size if (found.st_dev, found.st_ino) in seen else 0
        seen.add((found.st_dev, found.st_ino))
    return shared


def _saved(path: Path) -> float | None:
    """When a checkpoint was written, in Unix seconds."""
    manifest = path / "manifest.json"
    return manifest.stat().st_mtime if manifest.exists() else None


def _verify(one: NamedCheckpoint, quiet: bool) -> dict[str, Any]:
    """Check one checkpoint, and say how it went."""
    from dataclasses import asdict

    from headway.cli.checkpoint_view import CountingSource, progress_bar, size
    from headway.errors import DamagedState, StateError
    from headway.state import verify_checkpoint
    from headway.state.address import is_in_store, open_address

    try:
        with progress_bar(one.label, quiet=quiet) as progress:
            found = verify_checkpoint(CountingSource(open_address(one.address).source, progress))
    except StateError as error:
        if is_in_store(one.address) and not isinstance(error, DamagedState):
            raise  # there is none, or no answer: that is no damage
        line, result = error.message, {"step": one.step, "ok": False, "damage": error.message}
    else:
        line = f"ok, {found.tensors} tensors, {size(found.bytes)}, digest {found.digest[:16]}"
        result = {"ok": True, **asdict(found)}
    if not quiet:
        print(f"{one.label}: {line}", flush=True)
    return {"path": one.address, **result}


# -- export and import


def _averaged(checkpoint: "OpenCheckpoint") -> set[str]:
    """The parameters that a checkpoint has an average of."""
    from headway.errors import StateError

    found = {name.removeprefix("ema/") for name in checkpoint.manifest.tensors if name.startswith("ema/")}
    if not found:
        raise StateError(
            f"{checkpoint.location} has no average of its weights",
            hint="train.ema keeps one, from the first step on; without --ema the weights themselves are written",
        )
    return found


def _recipe(checkpoint: "OpenCheckpoint", one: NamedCheckpoint) -> "Recipe":
    """The recipe that a checkpoint was saved with, of a decoder that transformers can have."""
    from pydantic import ValidationError

    from headway.errors import ModelError
    from headway.recipe.upgrade import upgrade_recipe
    from headway.track import read_recipe

    said = checkpoint.manifest.recipe
    try:
        recipe = upgrade_recipe(said) if said else read_recipe(_home(one))
    except ValidationError:  # of a version whose recipes had other keys; a run's own file may have been mended
        recipe = read_recipe(_home(one))
    if recipe.model.class_ is not None:
        raise ModelError(
            f"{recipe.model.class_} has no form that transformers would open: only Headway's own decoders are exported",
            hint="a checkpoint's files are safetensors, and headway.state.tensors.read_tensors reads whole tensors",
        )
    return recipe


def _tokenizer_of(run: "RunFolder") -> "TokenizerFile | None":
    """A run's tokenizer, with the end of text that its data was built with."""
    import json

    try:
        end_id = int(json.loads(run.data_file.read_bytes())["end_of_text"])
    except (OSError, ValueError, KeyError, TypeError):
        return _tokenizer_file(run.tokenizer_file, None)
    return _tokenizer_file(run.tokenizer_file, end_id)


def _tokenizer_file(path: Path, end_id: int | None) -> "TokenizerFile | None":
    """A tokenizer.json if it is there, with the token that ends a document: the one told, or one of a usual name."""
    from headway.data.tokenizer import load_tokenizer
    from headway.errors import DataError
    from headway.state.huggingface import TokenizerFile

    if not path.exists():
        return None
    try:
        loaded = load_tokenizer(path, end_of_text=end_id)
    except DataError:  # one without an end of text still encodes and decodes
        return TokenizerFile(path, end_id)
    return TokenizerFile(path, loaded.end_of_text, loaded.raw.id_to_token(loaded.end_of_text))


def _length_and_end(folder: Path) -> tuple[int, int | None]:
    """The longest sequence that a Hugging Face model is meant for, and the token that ends a document."""
    import json

    config = json.loads((folder / "config.json").read_bytes())
    length, end = config.get("max_position_embeddings", config.get("n_positions")), config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return length if type(length) is int and length > 0 else 2048, end if type(end) is int else None


def _run_name(folder: Path) -> str:
    """A folder's name as far as a run may be called so."""
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:64] or "imported"
