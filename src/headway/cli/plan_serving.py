"""`headway plan MODEL --serve`: what a model needs and reaches when it is served."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cli.plan_view import wrapped
from headway.cli.serving_view import serving_document, serving_lines
from headway.cli.text import print_json
from headway.errors import RunError, UsageError
from headway.hardware import Cluster
from headway.plan.architecture import Architecture
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.hf_config import read_architecture
from headway.plan.roofline import RooflinePoint, draw_roofline, text_roofline
from headway.plan.serving import DTYPES, ServingLoad, ServingPlan, plan_serving
from headway.recipe import Recipe
from headway.recipe.huggingface import stored_dtype
from headway.state.hf_sidecars import longest_sequence, original_config
from headway.track import RunFolder, find_run, read_recipe, runs_root, split_ref
from headway.track.hub import hub_of

PROMPT, OUTPUT = 1000, 300
SEQUENCES = 256
"""Sequences that `headway serve` runs at the same time by default."""
FIDELITIES = ("limit", "default")


@dataclass(frozen=True)
class ServedModel:
    """A model to serve."""

    name: str
    architecture: Architecture
    dtype: str
    """Of its weights, as stored or trained."""
    longest: int | None = None
    """Longest sequence, if it has a limit."""
    source: str | None = None
    """What `headway serve` would take; None for a recipe, which has no weights."""


def model_of_config(path: Path) -> ServedModel:
    """Return the model of a Hugging Face folder, or of its config.json."""
    file = path / "config.json" if path.is_dir() else path
    architecture = read_architecture(file)
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    folder = file.resolve().parent
    return ServedModel(
        hub_of(path) or (folder.name if file.name == "config.json" else file.stem),
        architecture,
        stored_dtype(config) or "float32",
        longest if isinstance(longest, int) else None,
        str(path if path.is_dir() else path.parent),
    )


def model_of_run(reference: str) -> ServedModel:
    """Return the model of a run, by name or folder."""
    name, _ = split_ref(runs_root(None), reference)
    folder = Path(reference)
    try:
        run = RunFolder(folder) if (folder / "recipe.json").is_file() else find_run(runs_root(None), name)
    except RunError as error:
        raise UsageError(
            f"{reference} is no recipe, Hugging Face folder or run: {error.message}",
            hint="runs are in $HEADWAY_RUNS, else in ./runs",
        ) from None
    return model_of_recipe(read_recipe(run), run.name, reference, run.companions)


def model_of_recipe(
    recipe: Recipe, name: str | None = None, source: str | None = None, sidecars: Path | None = None
) -> ServedModel:
    """Return the model of a recipe whose vocabulary is known; `sidecars` has what came with its first weights."""
    model = recipe.model
    if model.class_ is not None:
        raise UsageError(
            f"model.class = {model.class_}: the cost of a custom class is unknown",
            hint="headway serve RUN shows its cache at the start",
        )
    original = {} if sidecars is None else original_config(sidecars)
    longest = longest_sequence(model, recipe.data.seq, original)
    return ServedModel(name or recipe.name, model.architecture(), recipe.train.dtype, longest, source)


@dataclass(frozen=True)
class ServingOptions:
    """The options of --serve, as typed."""

    prompt: int | None
    output: int | None
    dtype: str | None
    concurrency: int | None
    price: float | None
    fidelity: str | None


def print_serving_plan(
    model: ServedModel, cluster: Cluster, options: ServingOptions, roofline: Path | None, json: bool
) -> None:
    """Plan, and print the plan."""
    planned = _planned(model, cluster, options)
    drawn = _drawn(planned, roofline) if roofline is not None else ""
    if json:
        print_json(serving_document(planned))
        return
    lines = serving_lines(planned)
    if roofline is not None:
        lines += ["", *drawn.splitlines(), f"wrote {roofline}", ""]
    print("\n".join([*lines, *_next(planned, model)]))


def _planned(model: ServedModel, cluster: Cluster, options: ServingOptions) -> ServingPlan:
    if options.fidelity is not None and options.fidelity not in FIDELITIES:
        raise UsageError(
            f"--serve cannot be planned with --fidelity {options.fidelity}",
            hint="choose limit (roofline) or default (modelled kernels): GEMMs of small batches are not measured",
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"unknown --dtype {options.dtype}", hint=f"choose from {', '.join(DTYPES)}")
    fidelity: Fidelity = "default" if options.fidelity == "default" else "limit"
    load = _load(options, model.longest)
    if model.longest is not None and load.length > model.longest:
        raise UsageError(
            f"{load.length:,} tokens are too long: {model.name} takes {model.longest:,}",
            hint=f"--prompt and --output of {model.longest:,} tokens together",
        )
    dtype = options.dtype or ("float32" if cluster.chip.name == "cpu" else model.dtype)  # as `headway serve`
    return plan_serving(
        model.name,
        model.architecture,
        make_cost_model(cluster, fidelity),
        load,
        dtype=dtype,
        concurrency=options.concurrency,
        price=options.price,
    )


def _load(options: ServingOptions, longest: int | None) -> ServingLoad:
    """Return the lengths to plan for: as typed, else the usual ones, or what a model with a shorter context takes."""
    prompt, output = options.prompt or PROMPT, options.output or OUTPUT
    if options.prompt or options.output or longest is None or prompt + output <= longest:
        return ServingLoad(prompt, output)
    prompt = max(1, longest * PROMPT // (PROMPT + OUTPUT))
    return ServingLoad(prompt, max(1, longest - prompt))


def _drawn(plan: ServingPlan, file: Path) -> str:
    """Draw prefill and decoding with their shares of the time in steady state; return the same as text."""
    planned = plan.planned
    prefill_s, steps = sum(point.seconds for point in plan.prefill), plan.load.output - 1
    passes = {"prefill": (plan.prefill, planned.batch * planned.prefill_s / prefill_s), "decode": (plan.decode, steps)}
    points = [
        RooflinePoint(f"{phase}: {point.name}", times * point.flops, times * point.bytes, times * point.seconds)
        for phase, (parts, times) in passes.items()
        for point in parts
    ]
    title = f"{plan.name} on {plan.cluster.chip.name}: batch {planned.batch:,}, until each sequence is replaced"
    draw_roofline(points, plan.peak_flops_s, plan.cluster.chip.bandwidth_bytes_s, title, file)
    return text_roofline(points, plan.peak_flops_s, plan.cluster.chip.bandwidth_bytes_s, title, 80)


def _next(plan: ServingPlan, model: ServedModel) -> list[str]:
    if model.source is None:
        return wrapped("next: --json prints all figures; --roofline FILE.svg draws both passes", 6)
    batch = plan.planned.batch
    more = f" --max-sequences {batch}" if batch != SEQUENCES else ""
    return [f"next: headway serve {shlex.quote(model.source)}{more}"]  # in one line, to be copied
