"""`headway plan MODEL --serve`: what a model needs and reaches when it is served."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cli.plan_text import wrapped
from headway.cli.serving_view import serving_document, serving_lines
from headway.cli.serving_workload_view import workload_document, workload_lines
from headway.cli.text import print_json
from headway.errors import RunError, UsageError
from headway.hardware import Cluster
from headway.plan.architecture import Architecture
from headway.plan.costs import Fidelity, make_cost_model
from headway.plan.hf_config import read_architecture
from headway.plan.roofline import RooflinePoint, draw_roofline, text_roofline
from headway.plan.serving import PASS_TOKENS, SEQUENCES, ServingLoad, ServingPlan, plan_serving, plan_workload
from headway.plan.serving_latency import PassModel
from headway.plan.serving_passes import DTYPES
from headway.plan.serving_workload import uniform_requests
from headway.recipe import Recipe
from headway.recipe.huggingface import stored_dtype
from headway.state.hf_sidecars import longest_sequence, original_config
from headway.track import RunFolder, find_run, read_recipe, runs_root, split_ref
from headway.track.hub import hub_of

PROMPT, OUTPUT = 1000, 300
MOST_TOKENS = 10**8
"""Longest plausible sequence."""
FIDELITIES = ("limit", "default")
Lengths = tuple[int, int]
"""The shortest and the longest."""


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
    architecture = model.architecture()
    if architecture.diffusion is not None:
        raise UsageError(
            f"model.family = {model.family}: --serve plans models of text, not of images and video",
            hint="headway plan RECIPE plans its training",
        )
    original = {} if sidecars is None else original_config(sidecars)
    longest = longest_sequence(model, recipe.data.seq, original)
    return ServedModel(name or recipe.name, architecture, recipe.train.dtype, longest, source)


@dataclass(frozen=True)
class ServingOptions:
    """The options of --serve, as typed."""

    prompt: str | None
    output: str | None
    requests: int | None
    dtype: str | None
    concurrency: int | None
    max_batch_tokens: int | None
    exact: bool
    price: float | None
    fidelity: str | None


def print_serving_plan(
    model: ServedModel, cluster: Cluster, options: ServingOptions, roofline: Path | None, json: bool
) -> None:
    """Plan, and print the plan."""
    prompts, outputs = _lengths(options, model)
    served = _pass_model(model, cluster, options)
    if options.requests is not None:
        _print_workload(model, served, (prompts, outputs), options, roofline, json)
        return
    for name, (low, high) in (("prompt", prompts), ("output", outputs)):
        if low < high:
            raise UsageError(f"--{name} {low}:{high} needs --requests", hint=f"--requests 256, or --{name} {high}")
    pass_tokens = options.max_batch_tokens or PASS_TOKENS
    planned = plan_serving(
        model.name,
        served,
        ServingLoad(prompts[1], outputs[1]),
        concurrency=options.concurrency,
        pass_tokens=pass_tokens,
        price=options.price,
    )
    drawn = _drawn(planned, roofline) if roofline is not None else ""
    if json:
        print_json(serving_document(planned))
        return
    lines = serving_lines(planned)
    if roofline is not None:
        lines += ["", *drawn.splitlines(), f"wrote {roofline}", ""]
    otherwise = "--json prints all figures; --roofline FILE.svg draws both passes"
    print("\n".join([*lines, *_next(model, planned.planned.batch, pass_tokens, otherwise)]))


def _print_workload(
    model: ServedModel,
    served: PassModel,
    lengths: tuple[Lengths, Lengths],
    options: ServingOptions,
    roofline: Path | None,
    json: bool,
) -> None:
    """Plan requests that all arrive at once, and print the plan."""
    if roofline is not None:
        raise UsageError("--requests excludes --roofline", hint="leave out --requests: a roofline is of one batch")
    if served.costs.cluster.devices > 1:
        devices = served.costs.cluster.devices
        hint = f"--on {served.costs.cluster.chip.name}x1, with the requests of one server"
        raise UsageError(f"--requests plans one device, not {devices:,}", hint=hint)
    assert options.requests is not None
    pass_tokens = options.max_batch_tokens or PASS_TOKENS
    planned = plan_workload(
        model.name,
        served,
        uniform_requests(options.requests, *lengths),
        concurrency=options.concurrency,
        pass_tokens=pass_tokens,
        price=options.price,
    )
    if json:
        print_json(workload_document(planned))
        return
    following = _next(model, planned.limits.max_sequences, pass_tokens, "--json prints all figures")
    print("\n".join([*workload_lines(planned), *following]))


def _pass_model(model: ServedModel, cluster: Cluster, options: ServingOptions) -> PassModel:
    is_cpu = cluster.chip.name == "cpu"
    if options.fidelity is not None and options.fidelity not in FIDELITIES:
        raise UsageError(
            f"--serve cannot be planned with --fidelity {options.fidelity}",
            hint="choose default (a prediction for Headway's engine) or limit (a bound by roofline)",
        )
    if is_cpu and options.fidelity == "default":
        raise UsageError("--fidelity default predicts GPUs only", hint="--fidelity limit is a bound for CPUs, too")
    fidelity: Fidelity = "limit" if is_cpu or options.fidelity == "limit" else "default"
    if options.exact and fidelity == "limit":
        raise UsageError("--exact has no effect on a bound", hint="leave out --exact, or --fidelity limit")
    if options.exact and model.architecture.latent is not None:
        raise UsageError(f"--exact: {model.name} has latent attention, which exact mode refuses", hint="leave it out")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"unknown --dtype {options.dtype}", hint=f"choose from {', '.join(DTYPES)}")
    dtype = options.dtype or ("float32" if is_cpu else model.dtype)  # as `headway serve`
    return PassModel(model.architecture, make_cost_model(cluster, fidelity), dtype, options.exact)


def _lengths(options: ServingOptions, model: ServedModel) -> tuple[Lengths, Lengths]:
    """Return the lengths to plan for: as typed, else the usual ones, or what a model with a shorter context takes."""
    prompts = _parsed("--prompt", options.prompt) or (PROMPT, PROMPT)
    outputs = _parsed("--output", options.output) or (OUTPUT, OUTPUT)
    length, longest = prompts[1] + outputs[1], model.longest
    if longest is None or length <= longest:
        return prompts, outputs
    if options.prompt or options.output:
        raise UsageError(
            f"{length:,} tokens are too long: {model.name} takes {longest:,}",
            hint=f"--prompt and --output of {longest:,} tokens together",
        )
    prompt = max(1, longest * PROMPT // (PROMPT + OUTPUT))
    output = max(1, longest - prompt)
    return (prompt, prompt), (output, output)


def _parsed(option: str, text: str | None) -> Lengths | None:
    """Return what `1000` or `100:1024` says; None for nothing."""
    if text is None:
        return None
    low, _, high = text.partition(":")
    try:
        lengths = int(low), int(high or low)
    except ValueError:
        lengths = 0, 0
    if not 1 <= lengths[0] <= lengths[1] <= MOST_TOKENS:
        raise UsageError(f"invalid {option} {text}", hint=f"tokens, or the fewest and the most: {option} 100:1024")
    return lengths


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


def _next(model: ServedModel, sequences: int, pass_tokens: int, otherwise: str) -> list[str]:
    if model.source is None:
        return wrapped(f"next: {otherwise}", 6)
    more = f" --max-sequences {sequences}" if sequences != SEQUENCES else ""
    more += f" --max-batch-tokens {pass_tokens}" if pass_tokens != PASS_TOKENS else ""
    return [f"next: headway serve {shlex.quote(model.source)}{more}"]  # in one line, to be copied
