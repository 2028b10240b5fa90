"""`headway plan`: finds the fastest way to run a recipe on a cluster; predicts speed, memory, time and cost."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headway.cli.accuracy_view import against_lines
from headway.cli.options import Json, Settings
from headway.cli.plan_document import plan_document, point_document
from headway.cli.plan_serving import (
    ServingOptions,
    model_of_config,
    model_of_recipe,
    model_of_run,
    print_serving_plan,
)
from headway.cli.plan_view import explain_lines, next_lines, plan_lines, run_of, sweep_lines
from headway.cli.progress import terminal_bars
from headway.cli.text import plural, print_json
from headway.data import open_dataset
from headway.data.corpus import open_corpus
from headway.data.media.corpus import open_media_corpus
from headway.errors import UsageError
from headway.hardware import (
    Ceilings,
    Cluster,
    default_cluster,
    devices,
    find_ceilings,
    find_chip,
    load_cluster,
    parse_on,
    read_ceilings,
    this_cpu,
)
from headway.plan.accuracy.calibrate import fit, predict
from headway.plan.accuracy.score import as_json, read_cases, score_file
from headway.plan.costs import CostModel, Fidelity, make_cost_model
from headway.plan.efficiencies import Efficiencies, fitted_parameters
from headway.plan.explain import explain as explain_plan
from headway.plan.explain import roofline_points
from headway.plan.hf_config import read_architecture
from headway.plan.plan import Plan
from headway.plan.plan import plan as make_plan
from headway.plan.roofline import draw_roofline, text_roofline
from headway.plan.scaling import parse_sweep, sweep
from headway.plan.settings import parse_mesh
from headway.plan.task import SearchSpace
from headway.recipe import Model, Recipe, Train, load_recipe
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.sample_tokens import with_sample_tokens
from headway.state.address import is_in_store
from headway.track import runs_root
from headway.track.hub import local_folder

POOR = 0.25
"""Mean error above which a calibration is reported as poor."""
FIDELITIES = ("limit", "default", "measured")
RANKS = ("time", "cost")
PRECISIONS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "float32", "fp32": "float32",
    "fp8": "fp8", "float8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
"""Values of --precision, and the planner's names of them."""
MOST_REQUESTS = 100_000
"""Of a planned workload: as many take some seconds to plan."""
VOCABULARY = 4096
"""Of a dataset that is not built yet: the default of `headway data build`."""
VOCABULARY_MULTIPLE = 64
"""As training rounds it; repeated here since importing the agent takes longer than a plan."""


def plan(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A recipe in TOML; with --serve also a Hugging Face folder, hf:org/name, a config.json or a run."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Cluster, e.g. h100x8x16 (default: this machine)."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="Cluster as a cluster.toml.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Plan with this mesh only, e.g. shard=4,tensor=2.")
    ] = None,
    settings: Settings = None,
    fidelity: Annotated[
        str | None,
        typer.Option(
            metavar="limit|default|measured",
            help="What the cost model uses (default: the best available; default with --serve).",
        ),
    ] = None,
    ceilings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of `headway hardware measure`; implies measured.")
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="DOLLARS", help="Price per device-hour.")] = None,
    rank: Annotated[str, typer.Option(metavar="time|cost", help="Rank plans by time or cost.")] = "time",
    precision: Annotated[
        str | None, typer.Option(metavar="bf16|fp8|...", help="Precision of GEMMs, instead of the recipe's.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formula and numbers of each term.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Plan for the model of a config.json instead.")
    ] = None,
    imbalance: Annotated[
        float, typer.Option(metavar="X", min=1.0, help="Load of the busiest expert's device over the mean.")
    ] = 1.0,
    calibrate_to: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Calibrate to your own runs, in the columns of --against."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="nodes=A..B", help="Plan for several node counts: 8..512 or 8,12,16.")
    ] = None,
    roofline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the best plan's roofline to an .svg or .png.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Predict published runs and score the predictions.")
    ] = None,
    calibrate: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="With --against: calibrate to N lines per source.")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --against: seed that selects those lines.")] = 0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Plan inference: memory, largest batch, TTFT, tokens/s and cost.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="With --serve: length of prompts, or A:B (default: 1000)."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="With --serve: tokens generated, or A:B (default: 300)."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=MOST_REQUESTS, help="With --serve: so many requests, all at once."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="bfloat16|...", help="With --serve: precision of weights and KV cache."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --serve: sequences at a time (default: as many as pay)."),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="With --serve: tokens of a pass (default: 2048)."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="With --serve: the engine's exact mode.")] = False,
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
    if serve:
        training = {
            "--mesh": mesh, "--explain": explain, "--sweep": sweep, "--against": against, "--calibrate": calibrate,
            "--calibrate-to": calibrate_to, "--ceilings": ceilings, "--precision": precision,
            "--rank": rank != "time", "--imbalance": imbalance != 1.0,
        }  # fmt: skip
        excluded = next((option for option, value in training.items() if value not in (None, False)), None)
        if excluded is not None:
            raise UsageError(f"--serve excludes {excluded}", hint=f"leave out {excluded}, or plan training")
        options = ServingOptions(
            prompt, output, requests, dtype, concurrency, max_batch_tokens, exact, _checked_price(price), fidelity
        )
        _serve(recipe, model, settings or [], on, cluster, options, roofline, json)
        return
    serving = {
        "--prompt": prompt, "--output": output, "--requests": requests, "--dtype": dtype,
        "--concurrency": concurrency, "--max-batch-tokens": max_batch_tokens, "--exact": exact or None,
    }  # fmt: skip
    lonely = next((option for option, value in serving.items() if value is not None), None)
    if lonely is not None:
        raise UsageError(f"{lonely} needs --serve", hint="headway plan MODEL --serve --on h200x1")
    if against is not None:
        if recipe is not None or on is not None or cluster is not None:
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
    request = _Request(
        recipe, on, cluster, mesh, settings, fidelity, ceilings, price, rank, precision, model, calibrate_to, imbalance
    )
    if sweep is not None:
        if mesh is not None or explain or roofline is not None:
            raise UsageError(
                "--sweep excludes --mesh, --explain and --roofline",
                hint="leave them out, or plan for one number of nodes",
            )
        _sweep(request, sweep, json)
        return
    _plan(request, explain, roofline, json)


class _Request:
    """The request on the command line, loaded and checked."""

    def __init__(
        self,
        file: Path,
        on: str | None,
        cluster: Path | None,
        mesh: str | None,
        settings: list[str] | None,
        fidelity: str | None,
        ceilings: Path | None,
        price: float | None,
        rank: str,
        precision: str | None,
        model: Path | None,
        calibrate_to: Path | None,
        imbalance: float,
    ) -> None:
        self.file, self.mesh, self.price, self.settings = file, mesh, price, settings or []
        self.rank: Any = _one_of("--rank", rank, RANKS)
        self.fidelity: Fidelity = _one_of("--fidelity", fidelity or ("measured" if ceilings else "default"), FIDELITIES)
        self.precision = PRECISIONS[_one_of("--precision", precision, tuple(PRECISIONS))] if precision else None
        _checked_price(price)
        self.recipe = load_recipe(file, settings or ())
        self.arch, self.imbalance = None if model is None else read_architecture(model), imbalance
        if model is not None:
            name = model.resolve().parent.name if model.name == "config.json" else model.stem
            self.recipe = self.recipe.model_copy(update={"name": name or "model"})
        if self.arch is None:
            self.recipe = _resolved(self.recipe)
        self.parameters: Efficiencies | None = None
        if calibrate_to is not None:
            if self.fidelity == "limit":
                raise UsageError("--fidelity limit cannot be calibrated", hint="leave out --fidelity or --calibrate-to")
            self.parameters, self.fidelity = _calibrated(calibrate_to), "calibrated"
        self.cluster = _cluster(on, cluster, self.recipe.train.device)
        self.file_of_cluster = cluster
        if fidelity is None and self.fidelity == "default" and find_ceilings(self.cluster.chip) is not None:
            self.fidelity = "measured"  # the best available
        self.ceilings = _ceilings(ceilings, self.fidelity, self.cluster)
        if self.precision:
            self.cluster.chip.peak(self.precision)  # raises for unknown ones

    def plan(self, cluster: Cluster, keep: int = 6) -> Plan:
        """Return the best plan for a cluster."""
        return make_plan(
            self.recipe,
            cluster,
            fidelity=self.fidelity,
            parameters=self.parameters,
            ceilings=self.ceilings,
            arch=self.arch,
            imbalance=self.imbalance,
            choices=self.choices(),
            rank=self.rank,
            price=self.price,
            keep=keep,
        )

    @property
    def train_command(self) -> str:
        """The command that trains as planned; empty if the model is not the recipe's."""
        if self.arch is not None:
            return ""
        settings = [*self.settings]
        if self.precision == "fp8" and self.recipe.train.fp8 is None:
            settings += ["train.dtype=bfloat16"] if self.recipe.train.dtype != "bfloat16" else []
            settings.append("train.fp8.scaling=tensorwise")
        return " ".join(["headway train", str(self.file), *(f"--set {shlex.quote(setting)}" for setting in settings)])

    def choices(self) -> SearchSpace:
        """Return what the options fix; the recipe may fix more."""
        mesh = parse_mesh(self.mesh) if self.mesh else None
        return SearchSpace(mesh=mesh, precisions=(self.precision,) if self.precision else None)

    def costs(self) -> CostModel:
        """Return the cost model of the plan."""
        return make_cost_model(self.cluster, self.fidelity, self.parameters, self.ceilings)


def _calibrated(file: Path) -> Efficiencies:
    """Return efficiencies calibrated to the runs of a file."""
    cases, skipped = read_cases(file)
    if not cases:
        reason = next(iter(skipped.values()), "it is empty")
        raise UsageError(f"{file}: cannot model any of its runs: {reason}")
    note = f"; {plural(len(skipped), 'line')} could not be modelled" if skipped else ""
    efficiencies = fit(cases, fitted_parameters())
    mean_error = sum(abs(predict(case, efficiencies) / case.tokens_s - 1) for case in cases) / len(cases)
    chips = ", ".join(sorted({case.chip for case in cases}))
    print(
        f"calibrated to {plural(len(cases), 'run')} of {file} on {chips}{note}; mean error now {mean_error:.0%}",
        file=sys.stderr,
    )
    if mean_error > POOR:
        print("note: poor fit to these runs: check the file", file=sys.stderr)
    return efficiencies


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise UsageError(f"unknown {option} {value}", hint=f"choose from {', '.join(known)}")
    return value


def _checked_price(price: float | None) -> float | None:
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"invalid --price {price:g}", hint="dollars per device-hour, e.g. 2.50")
    return price


def _cluster(on: str | None, file: Path | None, device: Literal["auto", "cpu", "cuda"]) -> Cluster:
    if on is not None and file is not None:
        raise UsageError("--on and --cluster exclude each other", hint="give one of them")
    if on is not None:
        return parse_on(on)
    if file is not None:
        return load_cluster(file)
    local = devices(device)
    if local.kind == "cpu":
        return default_cluster(this_cpu())  # one worker that uses all cores
    chip = find_chip(local.name)
    if chip is None:
        raise UsageError(f"unknown chip {local.name}", hint="plan for another one, e.g. --on h100x8x1")
    return default_cluster(chip, local.count)


def _ceilings(file: Path | None, fidelity: str, cluster: Cluster) -> Ceilings | None:
    if file is None:
        return None
    if fidelity != "measured":
        raise UsageError(f"--ceilings needs measured fidelity, not {fidelity}", hint="leave out --fidelity")
    measured = read_ceilings(file)
    if measured.chip != cluster.chip.name:
        raise UsageError(
            f"{file} was measured on {measured.chip or measured.device}, but the plan is for {cluster.chip.name}",
            hint="run headway hardware measure there, or leave out --ceilings",
        )
    return measured


def _resolved(recipe: Recipe) -> Recipe:
    """Return the recipe with the model's shape and vocabulary, as `headway train` resolves them."""
    model = recipe.model
    if model.init is not None:
        from headway.agent.launch.prepare import new_positions  # 0.35 s, and few recipes have model.init
        from headway.agent.launch.resolve import resolve_model

        model = resolve_model(model, runs_root(None))
        for note in new_positions(recipe.model_copy(update={"model": model})):
            print(f"note: {note}", file=sys.stderr)
    if isinstance(model, DiffusionModel):
        return with_sample_tokens(recipe.model_copy(update={"model": model, "train": _with_steps(recipe)}))
    if model.vocab_size is None:
        model = _with_vocabulary(model, Path(next(iter(recipe.data.parts.values())).path))
    return recipe.model_copy(update={"model": model, "train": _with_steps(recipe)})


def _with_steps(recipe: Recipe) -> Train:
    """Return the train section with the steps that its epochs are, if the data is there to count."""
    train = recipe.train
    if train.epochs is None:
        return train
    if all((Path(part.path) / "manifest.json").exists() for part in recipe.data.parts.values()):
        return (open_corpus(recipe) if recipe.data.media is None else open_media_corpus(recipe)).train()
    print(
        f"note: the data is not built; assuming {plural(train.steps, 'step')} for {train.epochs:g} epochs",
        file=sys.stderr,
    )
    return train.with_steps(train.steps)


def _with_vocabulary(model: Model, data: Path) -> Model:
    size = VOCABULARY
    if (data / "manifest.json").exists():
        size = open_dataset(data).manifest.vocab_size
    else:
        print(f"note: {data} is not built; assuming a vocabulary of {size:,} tokens", file=sys.stderr)
    return model.model_copy(update={"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE})


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
        served, device = model_of_recipe(_resolved(recipe), sidecars=sidecars), recipe.train.device
    else:
        served = model_of_config(what) if is_config else model_of_run(str(what))
    print_serving_plan(served, _cluster(on, cluster, device), options, roofline, json)


# -- one cluster


def _plan(request: _Request, explain: bool, roofline: Path | None, json: bool) -> None:
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


def _sweep(request: _Request, text: str, json: bool) -> None:
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
    if request.file_of_cluster is not None:
        cluster_option = f"--cluster {request.file_of_cluster}"
    command = f"headway plan {request.file} {cluster_option}"
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
