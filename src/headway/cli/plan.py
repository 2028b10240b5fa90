"""`headway plan`: finds the fastest way to run a recipe on a cluster; predicts speed, memory, time and cost."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from headway.cli.accuracy_view import against_lines
from headway.cli.options import Json, Settings
from headway.cli.plan_document import plan_document, point_document
from headway.cli.plan_explain_view import explain_lines
from headway.cli.plan_request import PlanOptions, PlanRequest, checked_price, cluster_of, load_request, resolved
from headway.cli.plan_scaling_view import sweep_lines
from headway.cli.plan_serving import (
    ServingOptions,
    model_of_config,
    model_of_recipe,
    model_of_run,
    print_serving_plan,
)
from headway.cli.plan_view import next_lines, plan_lines, run_of
from headway.cli.progress import terminal_bars
from headway.cli.text import plural, print_json
from headway.errors import UsageError
from headway.plan.accuracy.score import as_json, score_file
from headway.plan.costs import CostModel
from headway.plan.explain import explain as explain_plan
from headway.plan.explain import roofline_points
from headway.plan.plan import Plan
from headway.plan.roofline import draw_roofline, text_roofline
from headway.plan.scaling import parse_sweep, sweep
from headway.recipe import load_recipe
from headway.state.address import is_in_store
from headway.track.hub import local_folder

MOST_REQUESTS = 100_000
"""Of a planned workload: as many take some seconds to plan."""
RecipeOrModel = Annotated[
    Path | None,
    typer.Argument(
        help="A recipe in TOML; with --serve also a Hugging Face folder, hf:org/name, a config.json or a run."
    ),
]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Cluster, e.g. h100x8x16 (default: this machine)."),
]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="Cluster as a cluster.toml.")]
Mesh = Annotated[
    str | None, typer.Option(metavar="AXIS=N,...", help="Plan with this mesh only, e.g. shard=4,tensor=2.")
]
FidelityName = Annotated[
    str | None,
    typer.Option(
        metavar="limit|default|measured",
        help="What the cost model uses (default: the best available; default with --serve).",
    ),
]
CeilingsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Output of `headway hardware measure`; implies measured.")
]
Price = Annotated[float | None, typer.Option(metavar="DOLLARS", help="Price per device-hour.")]
Rank = Annotated[str, typer.Option(metavar="time|cost", help="Rank plans by time or cost.")]
Precision = Annotated[
    str | None, typer.Option(metavar="bf16|fp8|...", help="Precision of GEMMs, instead of the recipe's.")
]
Explain = Annotated[bool, typer.Option("--explain", help="Show the formula and numbers of each term.")]
ModelConfig = Annotated[
    Path | None, typer.Option(metavar="CONFIG", help="Plan for the model of a config.json instead.")
]
Imbalance = Annotated[
    float, typer.Option(metavar="X", min=1.0, help="Load of the busiest expert's device over the mean.")
]
OwnRunsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.csv", help="Calibrate to your own runs, in the columns of --against."),
]
NodeCounts = Annotated[
    str | None, typer.Option(metavar="nodes=A..B", help="Plan for several node counts: 8..512 or 8,12,16.")
]
RooflineFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the best plan's roofline to an .svg or .png.")
]
RunsFile = Annotated[
    Path | None, typer.Option(metavar="FILE.csv", help="Predict published runs and score the predictions.")
]
CalibrationRuns = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="With --against: calibrate to N lines per source.")
]
Seed = Annotated[int, typer.Option(help="With --against: seed that selects those lines.")]
Serve = Annotated[bool, typer.Option("--serve", help="Plan inference: memory, largest batch, TTFT, tokens/s and cost.")]
Prompt = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="With --serve: length of prompts, or A:B (default: 1000)."),
]
Output = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="With --serve: tokens generated, or A:B (default: 300)."),
]
Requests = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=MOST_REQUESTS, help="With --serve: so many requests, all at once."),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="bfloat16|...", help="With --serve: precision of weights and KV cache."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="With --serve: sequences at a time (default: as many as pay)."),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="With --serve: tokens of a pass (default: 2048)."),
]
Exact = Annotated[bool, typer.Option("--exact", help="With --serve: the engine's exact mode.")]


def plan(
    recipe: RecipeOrModel = None,
    on: On = None,
    cluster: ClusterFile = None,
    mesh: Mesh = None,
    settings: Settings = None,
    fidelity: FidelityName = None,
    ceilings: CeilingsFile = None,
    price: Price = None,
    rank: Rank = "time",
    precision: Precision = None,
    explain: Explain = False,
    model: ModelConfig = None,
    imbalance: Imbalance = 1.0,
    calibrate_to: OwnRunsFile = None,
    sweep: NodeCounts = None,
    roofline: RooflineFile = None,
    against: RunsFile = None,
    calibrate: CalibrationRuns = None,
    seed: Seed = 0,
    serve: Serve = False,
    prompt: Prompt = None,
    output: Output = None,
    requests: Requests = None,
    dtype: Dtype = None,
    concurrency: Concurrency = None,
    max_batch_tokens: MaxBatchTokens = None,
    exact: Exact = False,
    json: Json = False,
) -> None:
    """Find the fastest way to run a recipe on a cluster: mesh, speed, memory, time and cost.

    With --serve: what a model needs and reaches when it is served: predicted, or bounds by roofline.

    Keys of --json: recipe, model, seq, batch, cluster, fidelity, parameters_used, best, plans, runnable, run, search;
    with --explain also explain. A plan has mesh, microbatch, zero, recompute, recompute_blocks, keeps_weights,
    reduces_each, schedule, chunks, stages, precision, step_s, tokens_s, mfu, accounts, exposed, memory, run, reason and
    runnable. --sweep gives points, --against rows and tables. --serve gives name, model, cluster, fidelity, dtype,
    prompt, output, memory, largest_batch, compute_bound_batch, ttft_s, batch, step_s, prefill_s, prefill_share,
    time_per_token_s, tokens_s, tokens_s_per_device, requests_s, price_per_device_hour, cost_per_million_tokens,
    batches, rooflines, exact and start_s; with --requests name, model, cluster, fidelity, dtype, exact, requests,
    lengths, memory, max_sequences, max_batch_tokens, prompt_tokens, output_tokens, seconds, prefill_s, decode_s,
    host_s, prefill_passes, decode_passes, mean_batch, prefill_flops_s, tokens_s, requests_s, ttft_s, start_s,
    price_per_device_hour, cost and cost_per_million_tokens.
    """
    training = {
        "--mesh": mesh, "--explain": explain, "--sweep": sweep, "--against": against, "--calibrate": calibrate,
        "--calibrate-to": calibrate_to, "--ceilings": ceilings, "--precision": precision,
        "--rank": rank != "time", "--imbalance": imbalance != 1.0,
    }  # fmt: skip
    serving = {
        "--prompt": prompt, "--output": output, "--requests": requests, "--dtype": dtype,
        "--concurrency": concurrency, "--max-batch-tokens": max_batch_tokens, "--exact": exact,
    }  # fmt: skip
    option = _first_given(training if serve else serving)
    if serve:
        if option is not None:
            raise UsageError(f"--serve excludes {option}", hint=f"leave out {option}, or plan training")
        options = ServingOptions(
            prompt, output, requests, dtype, concurrency, max_batch_tokens, exact, checked_price(price), fidelity
        )
        _serve(recipe, model, settings or [], on, cluster, options, roofline, json)
        return
    if option is not None:
        raise UsageError(f"{option} needs --serve", hint="headway plan MODEL --serve --on h200x1")
    if against is not None:
        if _first_given({"recipe": recipe, "--on": on, "--cluster": cluster}) is not None:
            raise UsageError(
                "--against takes no recipe and no cluster",
                hint=f"headway plan --against {against}, or headway plan RECIPE --on h100x8x4",
            )
        _against(against, calibrate, seed, json)
        return
    if recipe is None:
        raise UsageError("nothing to plan", hint="headway plan RECIPE --on h100x8x4, or --against FILE.csv")
    if calibrate is not None:
        raise UsageError(
            "--calibrate needs --against FILE.csv", hint="use --against FILE.csv, or --calibrate-to for your own runs"
        )
    if sweep is not None and _first_given({"--mesh": mesh, "--explain": explain, "--roofline": roofline}) is not None:
        raise UsageError(
            "--sweep excludes --mesh, --explain and --roofline",
            hint="leave them out, or plan for one number of nodes",
        )
    request = load_request(
        PlanOptions(
            recipe, on, cluster, mesh, tuple(settings or ()), fidelity, ceilings, price, rank, precision, model,
            calibrate_to, imbalance,
        )
    )  # fmt: skip
    if sweep is not None:
        _sweep(request, sweep, json)
    else:
        _plan(request, explain, roofline, json)


def _first_given(options: Mapping[str, object]) -> str | None:
    """Return the name of the first option that was given."""
    return next((name for name, value in options.items() if value not in (None, False)), None)


# -- inference


def _serve(
    source: Path | None,
    config: Path | None,
    settings: list[str],
    on: str | None,
    cluster: Path | None,
    options: ServingOptions,
    roofline: Path | None,
    json: bool,
) -> None:
    """Plan the inference of a recipe's model, a Hugging Face folder or a run."""
    what = config or source
    if what is None:
        raise UsageError("nothing to plan", hint="headway plan RECIPE|FOLDER|RUN --serve --on h200x1")
    what = local_folder(what)
    is_config = what.suffix == ".json" or (what / "config.json").is_file() or config is not None
    is_recipe = not is_config and (what.is_file() or what.suffix == ".toml")
    if settings and not is_recipe:
        raise UsageError(f"--set needs a recipe, and {what} is not one", hint="headway plan RECIPE --serve --set ...")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    if is_recipe:
        recipe = load_recipe(what, settings)
        init = recipe.model.init
        sidecars = None if init is None or is_in_store(init) else Path(init)
        served, device = model_of_recipe(resolved(recipe), sidecars=sidecars), recipe.train.device
    else:
        served = model_of_config(what) if is_config else model_of_run(str(what))
    print_serving_plan(served, cluster_of(on, cluster, device), options, roofline, json)


# -- one cluster


def _plan(request: PlanRequest, explain: bool, roofline: Path | None, json: bool) -> None:
    planned = request.plan(request.cluster)
    runs = {rank: run_of(planned, candidate) for rank, candidate in enumerate(planned.result.plans)}
    sections = explain_plan(planned.best.estimate, request.costs()) if explain else []
    drawn = _roofline(planned, request.costs(), roofline) if roofline is not None else ""
    if json:
        document = plan_document(planned, request.costs(), runs)
        if explain:
            document["explain"] = [
                {
                    "title": section.title,
                    "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows],
                    "note": section.note,
                }
                for section in sections
            ]
        print_json(document)
        return
    lines = plan_lines(planned, request.recipe, runs)
    if explain:
        lines += ["", *explain_lines(sections), ""]
    if roofline is not None:
        lines += ["", *drawn.splitlines(), f"wrote {roofline}", ""]
    print("\n".join([*lines, *next_lines(planned, request.train_command)]))


def _roofline(planned: Plan, costs: CostModel, file: Path) -> str:
    best, chip = planned.best.estimate, planned.cluster.chip
    points = roofline_points(best, costs)
    title = f"{planned.name} on {planned.cluster.name}: {best.settings.mesh.describe()}, a step of one device"
    draw_roofline(points, best.peak_flops_s, chip.bandwidth_bytes_s, title, file)
    return text_roofline(points, best.peak_flops_s, chip.bandwidth_bytes_s, title, 80)


def _sweep(request: PlanRequest, text: str, json: bool) -> None:
    nodes = parse_sweep(text)
    with _progress() as tell:
        points = sweep(
            request.cluster,
            nodes,
            lambda cluster: request.plan(cluster, keep=1),
            lambda done, of: tell(f"planning for {plural(nodes[done], 'node')}", done, of),
        )
    if json:
        print_json({"recipe": request.recipe.name, "points": [point_document(points, point) for point in points]})
        return
    cluster_option = f"--on {request.cluster.chip.name}x{request.cluster.per_node}x{nodes[-1]}"
    if request.options.cluster is not None:
        cluster_option = f"--cluster {request.options.cluster}"
    command = f"headway plan {request.options.recipe} {cluster_option}"
    print("\n".join(sweep_lines(points, command)))


def _against(file: Path, calibrate: int | None, seed: int, json: bool) -> None:
    if not file.exists():
        raise UsageError(f"{file}: no such file", hint="for example benchmarks/plan/published_runs.csv")
    with _progress() as tell:
        report = score_file(file, calibrate, seed, tell)
    if json:
        print_json(as_json(report))
    else:
        print("\n".join(against_lines(report)))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield what draws a bar on a terminal; elsewhere nothing, since this takes seconds."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    with terminal_bars("{task.description:28}", "Bar", "{task.percentage:>3.0f}%") as bar:
        task = bar.add_task("")
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
