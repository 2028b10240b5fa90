"""`headway sample RUN|FOLDER --prompt TEXT`: generates text with a model.

The model runs in another process (`headway.inference.sample`); this module prints what that generates.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.model_process import model_of, model_process
from headway.cli.options import Json, ModelSource, Runs
from headway.errors import UsageError
from headway.track import runs_root, split_ref

Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Text to continue; repeatable (default: start a new document)."),
]


def sample(
    model: ModelSource,
    prompt: Prompt = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens to generate (default: 100, or what fits).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature (0 = greedy).")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the top K tokens (0 = off).")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same text.")] = 0,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Generate text with a model."""
    at = split_ref(runs_root(runs), model)[1] if not Path(model).exists() else None
    if at is not None and step is not None and at != step:
        raise UsageError(f"{model} and --step {step} name different checkpoints", hint="give only one of them")
    if step is not None and (Path(model) / "config.json").is_file():
        raise UsageError(f"{model} is a folder: it has no steps", hint="leave --step out")
    source, name = model_of(f"{model}@{step}" if step is not None and at is None else model, runs)
    prompts = prompt or [""]
    if any("\ud800" <= letter <= "\udfff" for text in prompts for letter in text):
        raise UsageError("a prompt is not valid UTF-8", hint="check the terminal's encoding")
    request = {
        **source,
        "prompts": prompts,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }
    pieces = _ask(request)
    if json:
        run, _, used_step = name.rpartition("@") if "run" in source else (name, "", "")
        _print_json(run, int(used_step) if used_step else None, prompts, pieces)
    else:
        _print_text(prompts, pieces)


def _ask(request: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Start the sampling process; yield (prompt index, piece of text) as they come; raise the error it reports."""
    with model_process("headway.inference.sample", "sampling", request) as running:
        for message in running.messages():
            yield message["prompt_index"], message["text"]


def _print_text(prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Print each prompt and its continuation as it comes, with a blank line between two."""
    shown = -1
    for index, text in pieces:
        while shown < index:
            shown += 1
            print(("\n\n" if shown else "") + prompts[shown], end="", flush=True)
        print(text, end="", flush=True)
    for rest in range(shown + 1, len(prompts)):
        print(("\n\n" if rest else "") + prompts[rest], end="")
    print()


def _print_json(run: str, step: int | None, prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    texts = [""] * len(prompts)
    for index, text in pieces:
        texts[index] += text
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    print(json.dumps({"run": run, "step": step, "samples": samples}))
