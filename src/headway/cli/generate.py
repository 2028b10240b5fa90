"""`headway generate RUN|FOLDER IN.jsonl --out OUT.jsonl`: runs a file of prompts through a model.

The model runs in another process (`headway.inference.batch`); this module shows how far it is.
"""

import contextlib
import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.model_process import ModelProcess, model_of, model_process
from headway.cli.options import Json, ModelSource, Runs
from headway.cli.progress import terminal_bars
from headway.errors import UsageError


def generate(
    model: ModelSource,
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl", help='Lines of {"prompt": ...} or {"messages": [...]}, with optional "params".'
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to append answers to; inputs that it has already are skipped.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens to generate (default: 256, or what fits).")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Sampling temperature (0 = greedy).")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from the top K tokens (0 = off).")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample from the top share of mass.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Outputs per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Run a file of prompts through a model; resumable."""
    if not inputs.is_file():
        raise UsageError(f"no file {inputs}", hint='it has lines of {"prompt": "..."}')
    if out is None:
        raise UsageError("--out is needed", hint=f"headway generate {model} {inputs} --out answers.jsonl")
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"cannot write {out}", hint="name a file in a folder that exists")
    source, name = model_of(model, runs)
    sampling = {
        "max_tokens": max_tokens,
        "n": n,
        "seed": seed,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    request = {
        **source,
        "inputs": str(inputs),
        "output": str(out),
        "device": device,
        "dtype": dtype,
        "params": {key: value for key, value in sampling.items() if value is not None},
    }
    with model_process("headway.inference.batch", "inference", request) as running:
        first, last = _follow(running, shows=sys.stderr.isatty() and not json)
    skipped = first.get("done", 0)
    if json:
        facts = {"model": name, "out": str(out), "inputs": last["total"], "done": last["done"], "skipped": skipped}
        print(jsonlib.dumps(facts))
        return
    already = f" ({skipped:,} were there already)" if skipped else ""
    print(f"{last['done']:,} of {last['total']:,} inputs answered in {out}{already}")


def _follow(running: ModelProcess, *, shows: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Follow a process to its end, with a progress bar on a terminal; return its first and last count."""
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    bars = terminal_bars("{task.description}", "Bar", "{task.completed:,}/{task.total:,}", "TimeRemaining")
    with bars if shows else contextlib.nullcontext():
        task = None
        for message in running.messages():
            first, last = first or message, message
            if shows:
                if task is None:
                    task = bars.add_task("generating", total=message["total"])
                bars.update(task, completed=message["done"])
    return first, last
