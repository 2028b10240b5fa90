"""`headway sample RUN --prompt TEXT`: what a run's model has to say.

Tensors live in a process of their own (`headway.inference.sample`); this file asks it and prints what comes.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headway.cli.options import Json, Runs

__all__ = ["sample"]

RunAtStep = Annotated[
    str,
    typer.Argument(metavar="RUN[@STEP]", help="A run's name, a unique prefix of it, or `last`; and a step of it."),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Text to continue; repeatable. Without one, a document is begun."),
]


def sample(
    run: RunAtStep,
    prompt: Prompt = None,
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to use (default: the newest).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the so many likeliest; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Continue a text with a run's model."""
    from headway.errors import UsageError
    from headway.state import find_checkpoint, list_checkpoints
    from headway.track import find_run, parse_ref, runs_root

    ref, at = parse_ref(run)
    if at is not None and step is not None and at != step:
        raise UsageError(f"{run} and --step {step} name two checkpoints", hint="give one of them")
    folder = find_run(runs_root(runs), ref)
    checkpoint = find_checkpoint(folder.checkpoints, step if at is None else at)
    prompts = prompt or [""]
    if any("\ud800" <= letter <= "\udfff" for text in prompts for letter in text):
        raise UsageError("a prompt is not valid UTF-8", hint="check the terminal's encoding")
    request = {
        "run": str(folder.path),
        "checkpoint": str(checkpoint),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }
    pieces = _ask(request)
    if json:
        found = next(entry.step for entry in list_checkpoints(folder.checkpoints) if entry.path == checkpoint)
        _print_json(folder.name, found, prompts, pieces)
    else:
        _print_text(prompts, pieces)


def _ask(request: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Start the tensor process; yield (prompt's index, piece of text) as they come; raise what it reports."""
    import json
    import subprocess
    import sys
    import tempfile

    # Files, not pipes, for what has no reader while we read its output: nothing can block or break.
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as log:
        question.write(json.dumps(request).encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.inference.sample"],
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        try:
            told = None
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    told = message
                else:
                    yield message["prompt_index"], message["text"]
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if status != 0:
            log.seek(0)
            _fail(status, told, log.read().decode(errors="replace"))


def _fail(status: int, told: dict[str, Any] | None, log: str) -> None:
    from headway.errors import HeadwayError, WorkerError

    if told is not None:
        error = HeadwayError(told["error"], hint=told.get("hint"))
        error.exit_status = status
        raise error
    last = log.strip().splitlines()[-1:] or ["it said nothing"]
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    raise WorkerError(f"the sampling process failed with {how}: {last[0]}")


def _print_text(prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Each prompt and its continuation as it comes, a blank line between two."""
    shown = -1
    for index, text in pieces:
        while shown < index:
            shown += 1
            print(("\n\n" if shown else "") + prompts[shown], end="", flush=True)
        print(text, end="", flush=True)
    for rest in range(shown + 1, len(prompts)):
        print(("\n\n" if rest else "") + prompts[rest], end="")
    print()


def _print_json(run: str, step: int, prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    import json

    texts = [""] * len(prompts)
    for index, text in pieces:
        texts[index] += text
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
    print(json.dumps({"run": run, "step": step, "samples": samples}))
