"""`headway checkpoint ls | verify | export`: what a run has saved, if it is whole, and taking it out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json, Run, Runs

if TYPE_CHECKING:
    from headway.state import Entry
    from headway.track import RunFolder

__all__ = ["app"]

app = typer.Typer(help="List, verify and export a run's checkpoints.", no_args_is_help=True)

RunAt = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run's name, a unique prefix of it, or `last`; a step.")
]


@app.command("ls")
def list_command(run: Run, runs: Runs = None, json: Json = False) -> None:
    """List a run's checkpoints, oldest first."""
    from headway.cli.text import print_json
    from headway.state import list_checkpoints
    from headway.track import find_run, runs_root

    folder = find_run(runs_root(runs), run)
    rows = [_describe(entry) for entry in list_checkpoints(folder.checkpoints)]
    if json:
        print_json({"run": folder.name, "checkpoints": rows})
    elif not rows:
        print(f"{folder.name} has no checkpoint yet")
    else:
        print("    step       size  workers  saved                digest")
        for row in rows:
            print(_line(row))
        print(f"next: headway checkpoint verify {folder.name}")


@app.command("verify")
def verify_command(run: RunAt, runs: Runs = None, json: Json = False) -> None:
    """Read checkpoints back and check every byte: the one of a step, or all that the run has."""
    from headway.cli.text import print_json
    from headway.errors import StateError

    folder, entries = _wanted(run, runs)
    results = [_verify(entry, quiet=json) for entry in entries]
    damaged = [result["step"] for result in results if not result["ok"]]
    if json:
        print_json({"run": folder.name, "ok": not damaged, "checkpoints": results})
    if damaged:
        steps = ", ".join(map(str, damaged))
        raise StateError(
            f"{len(damaged)} of {len(results)} checkpoints of {folder.name} damaged: step {steps}",
            hint="remove what is damaged; headway resume then goes on from the newest that is left",
        )


@app.command("export")
def export_command(
    run: RunAt,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.")],
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder that transformers opens."""
    from headway.cli.text import print_json
    from headway.state import find_checkpoint
    from headway.track import find_run, parse_ref, runs_root

    name, step = parse_ref(run)
    source = find_run(runs_root(runs), name)
    tokenizer = source.path / "tokenizer.json"
    result = _run_export(
        {
            "checkpoint": str(find_checkpoint(source.checkpoints, step).resolve()),
            "recipe": str(source.recipe_file.resolve()),
            "tokenizer": str(tokenizer.resolve()) if tokenizer.exists() else None,
            "folder": str(folder.absolute()),
        }
    )
    if json:
        print_json({"run": source.name, **result})
    else:
        print(f"{folder}: step {result['step']} of {source.name}, {result['tensors']} tensors")
        print(f"next: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def _wanted(ref: str, runs: Path | None) -> tuple["RunFolder", list["Entry"]]:
    """The run, and the checkpoint that the reference names or else all of them."""
    from headway.state import Entry, find_checkpoint, list_checkpoints
    from headway.track import find_run, parse_ref, runs_root

    name, step = parse_ref(ref)
    folder = find_run(runs_root(runs), name)
    path = find_checkpoint(folder.checkpoints, step)
    return folder, list_checkpoints(folder.checkpoints) if step is None else [Entry(step, path)]


def _describe(entry: "Entry") -> dict[str, Any]:
    """What the manifest says; a damaged one is listed too, with what is wrong."""
    from headway.errors import StateError
    from headway.state import open_checkpoint

    row: dict[str, Any] = {"step": entry.step, "path": str(entry.path)}
    try:
        manifest = open_checkpoint(entry.path).manifest
        saved = (entry.path / "manifest.json").stat().st_mtime
    except StateError as error:
        return {**row, "damage": error.message}
    return {
        **row,
        "saved": saved,
        "bytes": manifest.bytes,
        "tensors": len(manifest.tensors),
        "workers": manifest.workers,
        "cursor": manifest.cursor,
        "chain": manifest.chain,
        "digest": manifest.digest,
    }


def _line(row: dict[str, Any]) -> str:
    import time

    if "damage" in row:
        return f"{row['step']:>8}  {row['damage']}"
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved"]))
    return f"{row['step']:>8}  {_size(row['bytes']):>9}  {row['workers']:>7}  {saved}  {row['digest'][:16]}"


def _verify(entry: "Entry", quiet: bool) -> dict[str, Any]:
    import dataclasses

    from headway.errors import StateError
    from headway.state import verify

    try:
        found = verify(entry.path)
    except StateError as error:
        line, result = error.message, {"step": entry.step, "ok": False, "damage": error.message}
    else:
        line = f"ok, {found.tensors} tensors, {_size(found.bytes)}, digest {found.digest[:16]}"
        result = {"ok": True, **dataclasses.asdict(found)}
    if not quiet:
        print(f"step {entry.step}: {line}", flush=True)
    return result


def _run_export(request: dict[str, Any]) -> dict[str, Any]:
    """Have a process that knows tensors do the work; its one line of JSON says how it went."""
    import json
    import subprocess
    import sys

    from headway.errors import ModelError

    done = subprocess.run(
        [sys.executable, "-m", "headway.models.export"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {"error": f"the export stopped with exit status {done.returncode}", "hint": None}
    if "error" in answer:
        raise ModelError(answer["error"], hint=answer["hint"])
    return answer


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
