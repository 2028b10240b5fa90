"""`headway generate RUN|FOLDER IN.jsonl --out OUT.jsonl`: runs a file of prompts through a model.

The model runs in another process (`headway.inference.batch`); this module shows how far it is.
"""

import json as jsonlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.model_process import end_of, model_of
from headway.cli.options import Json, Runs, complete_run
from headway.cli.progress import terminal_bars
from headway.errors import UsageError


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            autocompletion=complete_run,
            help="A run (RUN@STEP for one checkpoint), or a Hugging Face folder.",
        ),
    ],
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl", help='Lines of {"prompt": ...} or {"messages": [...]}, with optional "params".'
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to append answers to; inputs that it has already are skipped.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 256,
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
    with tempfile.TemporaryFile() as request_file, tempfile.TemporaryFile() as log:
        request_file.write(jsonlib.dumps(request).encode())
        request_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.inference.batch"], stdin=request_file, stdout=subprocess.PIPE, stderr=log
        )
        try:
            first, last, reported = _follow(process, quiet=json)
        finally:
            process.kill()  # if it has not ended by itself
            process.wait()
        end_of("inference", process.returncode, reported, log)
    skipped = first.get("done", 0)
    if json:
        facts = {"model": name, "out": str(out), "inputs": last["total"], "done": last["done"], "skipped": skipped}
        print(jsonlib.dumps(facts))
        return
    already = f" ({skipped:,} were there already)" if skipped else ""
    print(f"{last['done']:,} of {last['total']:,} inputs answered in {out}{already}")


def _follow(
    process: subprocess.Popen[bytes], *, quiet: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """Show progress until the process ends; return its first and last count, and an error that it reports."""
    assert process.stdout is not None
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    with terminal_bars("{task.description}", "Bar", "{task.completed:,}/{task.total:,}", "TimeRemaining") as bars:
        task = None
        for line in process.stdout:
            message = jsonlib.loads(line)
            if "error" in message:
                process.wait()
                return first, last, dict(message)
            first, last = first or message, message
            if not quiet and sys.stderr.isatty():
                if task is None:
                    task = bars.add_task("generating", total=message["total"], completed=message["done"])
                bars.update(task, completed=message["done"])
    process.wait()
    return first, last, None
