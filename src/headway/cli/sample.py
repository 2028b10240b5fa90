"""`headway sample RUN|FOLDER --prompt TEXT`: generates text with a model, or images and video with a diffusion model.

The model runs in another process (`headway.inference.sample`); this module prints what that generates. For diffusion
models see `sample_media.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli.model_process import model_of, model_process
from headway.cli.options import Json, ModelSource, Runs
from headway.cli.sample_media import diffusion_recipe, sample_media
from headway.errors import UsageError
from headway.track import runs_root, split_ref

Prompt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="Text to continue, or caption of an image or video; repeatable (default: a new document, or no caption).",
    ),
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
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same text or samples.")] = 0,
    label: Annotated[
        list[int] | None,
        typer.Option("--label", metavar="N", help="Class to generate; repeatable (default: each class once)."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of images or videos (default: one per prompt or label).")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Steps of the diffusion sampler (default: 20).")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="Classifier-free guidance (default: 2.0; 1 = none).")
    ] = None,
    sampler: Annotated[
        Literal["euler", "heun", "ddim", "ancestral"] | None,
        typer.Option(metavar="S", help="euler or heun (flow), ddim or ancestral (ddpm)."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH[xT]", help="Size of samples (default: that of the training data).")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image that an image-to-video model continues.")
    ] = None,
    ema: Annotated[bool, typer.Option(help="Use the EMA of a diffusion model's weights, if there is one.")] = True,
    fps: Annotated[int | None, typer.Option(min=1, max=240, help="Frames per second of an MP4 (default: 8).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Image (.png) or video (.mp4) to write.")
    ] = None,
    runs: Runs = None,
    json: Json = False,
) -> None:
    """Generate text with a model, or images and video with a diffusion model."""
    at = split_ref(runs_root(runs), model)[1] if not Path(model).exists() else None
    if at is not None and step is not None and at != step:
        raise UsageError(f"{model} and --step {step} name different checkpoints", hint="give only one of them")
    if step is not None and (Path(model) / "config.json").is_file():
        raise UsageError(f"{model} is a folder: it has no steps", hint="leave --step out")
    source, name = model_of(f"{model}@{step}" if step is not None and at is None else model, runs)
    prompts = prompt or [""]
    media: dict[str, object] = {
        "--label": label,
        "--count": count,
        "--steps": steps,
        "--guidance": guidance,
        "--sampler": sampler,
    }
    media |= {"--size": size, "--fps": fps, "--out": out, "--image": image}
    if any("\ud800" <= letter <= "\udfff" for text in prompts for letter in text):
        raise UsageError("a prompt is not valid UTF-8", hint="check the terminal's encoding")
    diffusion = diffusion_recipe(source)
    if diffusion is not None:
        if max_tokens is not None:
            raise UsageError("--max-tokens has no effect with a diffusion model", hint="leave it out")
        settings: dict[str, object] = {
            "steps": steps,
            "guidance": guidance,
            "sampler": sampler,
            "fps": fps,
            "seed": seed,
            "ema": ema,
        }
        settings |= {"image": None if image is None else str(image.absolute())}
        sample_media(
            name, source, diffusion, prompts=prompt or [], labels=label or [], count=count, size=size, out=out,
            settings=settings, as_json=json,
        )  # fmt: skip
        return
    given = next((option for option, value in media.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"{given} is for diffusion models, and {name} generates text", hint="leave it out")
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
