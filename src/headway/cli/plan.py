"""`headway plan`: how a recipe runs on a cluster, how fast, whether it fits, what it costs; and how sure that is."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import Json, Settings

if TYPE_CHECKING:
    from headway.hardware import Ceilings, Cluster
    from headway.plan.architecture import Architecture
    from headway.plan.costs import CostModel, Fidelity
    from headway.plan.efficiencies import Efficiencies
    from headway.plan.plan import Plan, RunForecast
    from headway.plan.scaling import ScalingPoint
    from headway.plan.search import RankedPlan
    from headway.plan.task import SearchSpace
    from headway.recipe import Model, Recipe

__all__ = ["plan"]

POOR = 0.25
"""Mean error after a calibration from which it is not worth much."""
FIDELITIES = ("limit", "default", "measured")
RANKS = ("time", "cost")
PRECISIONS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "float32", "fp32": "float32",
    "fp8": "fp8", "float8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
"""What the option takes, and what the planner calls it."""
VOCABULARY = 4096
"""Of a tokenizer that is not built yet: the default of `headway data build`."""
VOCABULARY_MULTIPLE = 64
"""As training rounds it; kept here since the agent's imports take longer than a plan."""


def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe in TOML; not with --score_file.")] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CHIPxPERNODExNODES", help="Where, like h100x8x16 (default: this machine)."),
    ] = None,
    cluster: Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="Where: a cluster.toml.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Use this mesh, like shard=4,tensor=2; no other is tried.")
    ] = None,
    settings: Settings = None,
    fidelity: Annotated[
        str | None, typer.Option(metavar="limit|default|measured", help="How much the cost model knows.")
    ] = None,
    ceilings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `headway hardware measure` wrote; implies measured.")
    ] = None,
    price: Annotated[float | None, typer.Option(metavar="DOLLARS", help="Of one device-hour.")] = None,
    rank: Annotated[str, typer.Option(metavar="time|cost", help="What makes a plan the best.")] = "time",
    precision: Annotated[
        str | None, typer.Option(metavar="bf16|fp8|...", help="Of the products, instead of the recipe's.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show each term's formula and numbers.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Plan for the model of a config.json instead: experts too.")
    ] = None,
    imbalance: Annotated[
        float, typer.Option(metavar="X", min=1.0, help="Tokens of the busiest expert's device over the mean.")
    ] = 1.0,
    calibrate_to: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Refit the model to your own runs, in --score_file's columns."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="nodes=A..B", help="Plan for several numbers of nodes: 8..512 or 8,12,16.")
    ] = None,
    roofline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the best plan's roofline to an .svg or .png file.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Predict published runs instead, and score that.")
    ] = None,
    calibrate: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="With --score_file: refit to N lines of each source.")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --score_file: which lines a calibration sees.")] = 0,
    json: Json = False,
) -> None:
    """Say how a recipe should run on a cluster: the best mesh, its speed, memory, days and cost, and why.

    Keys of --json: recipe, model, seq, batch, cluster, fidelity, parameters_used, best, plans, runnable, run, search;
    with --explain also explain. A plan has mesh, microbatch, zero, recompute, recompute_blocks, keeps_weights,
    reduces_each, schedule, chunks, stages, precision, step_s, tokens_s, mfu, accounts, exposed, memory, run, reason and
    runnable. --sweep gives points, --against rows and tables.
    """
    from headway.errors import UsageError

    if against is not None:
        if recipe is not None or on is not None or cluster is not None:
            raise UsageError(
                "--against predicts the runs of a file, not a recipe on a cluster",
                hint=f"headway plan --against {against}, or headway plan RECIPE --on h100x8x4",
            )
        _against(against, calibrate, seed, json)
        return
    if recipe is None:
        raise UsageError("nothing to plan", hint="headway plan RECIPE --on h100x8x4, or --against FILE.csv")
    if calibrate is not None:
        raise UsageError("--calibrate refits to published runs", hint="it goes with --against FILE.csv")
    asked = _Asked(
        recipe, on, cluster, mesh, settings, fidelity, ceilings, price, rank, precision, model, calibrate_to, imbalance
    )
    if sweep is not None:
        if mesh is not None or explain or roofline is not None:
            raise UsageError(
                "--sweep plans for several numbers of devices, each with a mesh of its own",
                hint="leave out --mesh, --explain and --roofline, or plan for one of them",
            )
        _sweep(asked, sweep, json)
        return
    _plan(asked, explain, roofline, json)


class _Asked:
    """What the command line asks for, read and checked."""

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
        from headway.errors import UsageError
        from headway.hardware import find_ceilings
        from headway.recipe import load_recipe

        self.file, self.mesh, self.price, self.settings = file, mesh, price, settings or []
        self.rank: Any = _one_of("--rank", rank, RANKS)
        self.fidelity: Fidelity = _one_of("--fidelity", fidelity or ("measured" if ceilings else "default"), FIDELITIES)
        self.precision = PRECISIONS[_one_of("--precision", precision, tuple(PRECISIONS))] if precision else None
        if price is not None and not 0 <= price < float("inf"):
            raise UsageError(f"--price {price:g}: not a price", hint="dollars of one device-hour, like 2.50")
        self.recipe = load_recipe(file, settings or ())
        self.arch, self.imbalance = _architecture(model), imbalance
        if model is not None:
            name = model.resolve().parent.name if model.name == "config.json" else model.stem
            self.recipe = self.recipe.model_copy(update={"name": name or "model"})
        if self.arch is None:
            self.recipe = _settled(self.recipe)
        self.parameters: Efficiencies | None = None
        if calibrate_to is not None:
            if self.fidelity == "limit":
                raise UsageError("the limit has nothing to calibrate", hint="leave out --fidelity or --calibrate-to")
            self.parameters, self.fidelity = _calibrated(calibrate_to), "calibrated"
        self.cluster = _cluster(on, cluster, self.recipe)
        self.file_of_cluster = cluster
        if fidelity is None and self.fidelity == "default" and find_ceilings(self.cluster.chip) is not None:
            self.fidelity = "measured"  # what is known best
        self.ceilings = _ceilings(ceilings, self.fidelity, self.cluster)
        if self.precision:
            self.cluster.chip.peak(self.precision)  # raises, with those it has

    def plan(self, cluster: "Cluster", keep: int = 6) -> "Plan":
        """The best plan there."""
        from headway.plan.plan import plan

        return plan(
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
        """What trains as planned; nothing where the model is another one than the recipe's."""
        if self.arch is not None:
            return ""
        return " ".join(["headway train", str(self.file), *(f"--set {shlex.quote(one)}" for one in self.settings)])

    def choices(self) -> "SearchSpace":
        """What is not left to the search; what the recipe says comes on top."""
        from headway.plan.settings import parse_mesh
        from headway.plan.task import SearchSpace

        mesh = parse_mesh(self.mesh) if self.mesh else None
        return SearchSpace(mesh=mesh, precisions=(self.precision,) if self.precision else None)

    def costs(self) -> "CostModel":
        """What the plan was made with."""
        from headway.plan.costs import make_cost_model

        return make_cost_model(self.cluster, self.fidelity, self.parameters, self.ceilings)


def _architecture(config: Path | None) -> "Architecture | None":
    from headway.plan.hf_config import read_architecture

    return read_architecture(config) if config is not None else None


def _calibrated(file: Path) -> "Efficiencies":
    """Parameters refitted to the runs of a file."""
    from headway.errors import UsageError
    from headway.plan.accuracy.calibrate import fit, predict
    from headway.plan.accuracy.score import read_cases
    from headway.plan.efficiencies import fitted_parameters

    cases, skipped = read_cases(file)
    if not cases:
        reason = next(iter(skipped.values()), "it has no lines")
        raise UsageError(f"{file}: none of its runs can be modelled: {reason}")
    note = f"; {len(skipped)} lines could not be modelled" if skipped else ""
    found = fit(cases, fitted_parameters())
    off = sum(abs(predict(case, found) / case.tokens_s - 1) for case in cases) / len(cases)
    chips = ", ".join(sorted({case.chip for case in cases}))
    print(f"calibrated to {len(cases)} runs of {file} on {chips}{note}; they are {off:.0%} off now", file=sys.stderr)
    if off > POOR:
        print("note: poor fit to these runs: check the file", file=sys.stderr)
    return found


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    from headway.errors import UsageError

    if value not in known:
        raise UsageError(f"{option} {value}: there is no such one", hint=f"one of {', '.join(known)}")
    return value


def _cluster(on: str | None, file: Path | None, recipe: "Recipe") -> "Cluster":
    from headway.errors import UsageError
    from headway.hardware import default_cluster, devices, find_chip, load_cluster, parse_on, this_cpu

    if on is not None and file is not None:
        raise UsageError("--on and --cluster both say where", hint="give one of them")
    if on is not None:
        return parse_on(on)
    if file is not None:
        return load_cluster(file)
    found = devices(recipe.train.device)
    if found.kind == "cpu":
        return default_cluster(this_cpu())  # one worker, which uses all cores
    chip = find_chip(found.name)
    if chip is None:
        raise UsageError(f"nothing is known of this machine's {found.name}", hint="--on h100x8x1 plans for others")
    return default_cluster(chip, found.count)


def _ceilings(file: Path | None, fidelity: str, cluster: "Cluster") -> "Ceilings | None":
    from headway.errors import UsageError
    from headway.hardware import read_ceilings

    if file is None:
        return None
    if fidelity != "measured":
        raise UsageError(f"--ceilings is for measured fidelity, not {fidelity}", hint="leave out --fidelity")
    found = read_ceilings(file)
    if found.chip != cluster.chip.name:
        raise UsageError(
            f"{file} was measured on {found.chip or found.device}, and the plan is for {cluster.chip.name}",
            hint="headway hardware measure there, or leave out --ceilings",
        )
    return found


def _settled(recipe: "Recipe") -> "Recipe":
    """With the model's shape and vocabulary, as `headway train` would find them; nothing needs to be built."""
    model = recipe.model
    if model.init is not None:
        from headway.agent.launch.prepare import resolve_model
        from headway.track import runs_root

        model = resolve_model(model, runs_root(None))
    if model.vocab_size is None:
        model = _with_vocabulary(model, Path(next(iter(recipe.data.parts.values())).path))
    return recipe.model_copy(update={"model": model})


def _with_vocabulary(model: "Model", data: Path) -> "Model":
    size = VOCABULARY
    if (data / "manifest.json").exists():
        from headway.data import open_dataset

        size = open_dataset(data).manifest.vocab_size
    else:
        print(f"note: {data} is not built; a vocabulary of {size:,} tokens is assumed", file=sys.stderr)
    return model.model_copy(update={"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE})


# -- one cluster


def _plan(asked: _Asked, explain: bool, roofline: Path | None, json: bool) -> None:
    from headway.cli.plan_view import explain_lines, next_lines, plan_lines, run_of
    from headway.cli.text import print_json
    from headway.plan.explain import explain as explained

    made = asked.plan(asked.cluster)
    runs = {place: run_of(made, one) for place, one in enumerate(made.result.plans)}
    sections = explained(made.best.estimate, asked.costs()) if explain else []
    drawn = _roofline(made, asked.costs(), roofline) if roofline is not None else ""
    if json:
        document = _document(made, asked.costs(), runs)
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
    lines = plan_lines(made, asked.recipe, runs)
    if explain:
        lines += ["", *explain_lines(sections), ""]
    if roofline is not None:
        lines += ["", *drawn.splitlines(), f"wrote {roofline}", ""]
    print("\n".join([*lines, *next_lines(made, asked.train_command)]))


def _roofline(made: "Plan", costs: "CostModel", file: Path) -> str:
    from headway.plan.explain import roofline_points
    from headway.plan.roofline import draw_roofline, text_roofline

    best, chip = made.best.estimate, made.cluster.chip
    points = roofline_points(best, costs)
    title = f"{made.name} on {made.cluster.name}: {best.settings.mesh.describe()}, a step of one device"
    draw_roofline(points, best.peak_flops_s, chip.bandwidth_bytes_s, title, file)
    return text_roofline(points, best.peak_flops_s, chip.bandwidth_bytes_s, title, 80)


def _document(made: "Plan", costs: "CostModel", runs: "dict[int, RunForecast]") -> dict[str, Any]:
    """Everything the screen shows and the numbers behind it."""
    from dataclasses import asdict

    from headway.cli.plan_view import run_of
    from headway.plan.flops import active_parameters, flops_per_token, flops_per_token_full_attention, parameters

    arch, able = made.architecture, made.runnable
    plans = [_plan_document(one, runs[place]) for place, one in enumerate(made.result.plans)]
    return {
        "recipe": made.name,
        "model": {
            **asdict(arch),
            "parameters": parameters(arch),
            "active_parameters": active_parameters(arch),
            "flops_per_token": flops_per_token(arch, made.seq),
            "flops_per_token_full_attention": flops_per_token_full_attention(arch, made.seq),
        },
        "seq": made.seq,
        "batch": made.batch,
        "cluster": made.cluster.as_dict() | {"devices": made.cluster.devices},
        "fidelity": made.fidelity,
        "parameters_used": asdict(costs.parameters),
        "best": plans[0],
        "plans": plans,
        "runnable": None if able is None else _plan_document(able, run_of(made, able)),
        "run": plans[0]["run"],
        "search": {
            "tried": made.result.tried,
            "pruned_by_memory": made.result.pruned_by_memory,
            "estimated": made.result.estimated,
        },
    }


def _plan_document(one: "RankedPlan", run: "RunForecast") -> dict[str, Any]:
    from dataclasses import asdict

    made, memory = one.estimate, one.estimate.memory
    settings = made.settings
    return {
        "mesh": asdict(settings.mesh),
        "devices": settings.mesh.devices,
        "microbatch": settings.microbatch,
        "microbatches": settings.microbatches,
        "zero": settings.zero,
        "recompute": settings.recompute,
        "recompute_blocks": settings.recompute_blocks,
        "keeps_weights": settings.keeps_weights,
        "reduces_each": settings.reduces_each,
        "schedule": settings.schedule,
        "chunks": settings.chunks,
        "stages": settings.stages,
        "precision": settings.precision,
        "reason": one.reason,
        "runnable": one.runnable,
        "step_s": made.step.seconds,
        "tokens_s": made.tokens_s,
        "tokens_s_per_device": made.tokens_s_per_device,
        "mfu": made.mfu,
        "mfu_full_attention": made.mfu_full_attention,
        "peak_flops_s": made.peak_flops_s,
        "accounts": dict(made.step.accounts),
        "exposed": dict(made.step.exposed),
        "bubble_share": made.step.bubble_share,
        "memory": {**asdict(memory), "allocated": memory.allocated, "total": memory.total, "fits": memory.fits},
        "run": _run_document(run),
    }


def _run_document(run: "RunForecast") -> dict[str, Any]:
    goodput = {**vars(run.goodput), "accounts": dict(run.goodput.accounts)}
    values = {key: getattr(run, key) for key in ("steps", "tokens", "seconds", "days", "device_hours", "cost")}
    return {**values, "price_per_device_hour": run.price_per_device_hour, "goodput": goodput}


# -- several


def _sweep(asked: _Asked, text: str, json: bool) -> None:
    from headway.cli.plan_view import sweep_lines
    from headway.cli.text import print_json
    from headway.plan.scaling import parse_sweep, sweep

    nodes = parse_sweep(text)
    with _progress() as tell:
        points = sweep(
            asked.cluster,
            nodes,
            lambda cluster: asked.plan(cluster, keep=1),
            lambda done, of: tell(f"planning for {nodes[done]:,} nodes", done, of),
        )
    if json:
        print_json({"recipe": asked.recipe.name, "points": [_point_document(points, point) for point in points]})
        return
    where = f"--on {asked.cluster.chip.name}x{asked.cluster.per_node}x{nodes[-1]}"
    if asked.file_of_cluster is not None:
        where = f"--cluster {asked.file_of_cluster}"
    command = f"headway plan {asked.file} {where}"
    print("\n".join(sweep_lines(points, command)))


def _point_document(points: "tuple[ScalingPoint, ...]", point: "ScalingPoint") -> dict[str, Any]:
    from headway.plan.scaling import efficiency

    made = point.plan
    return {
        "nodes": point.nodes,
        "devices": point.devices,
        "scaling": efficiency(points, point),
        "plan": None if made is None else _plan_document(made.best, made.run),
        "reason": point.reason or None,
    }


def _against(file: Path, calibrate: int | None, seed: int, json: bool) -> None:
    from headway.errors import UsageError

    if not file.exists():
        raise UsageError(f"{file}: no such file", hint="benchmarks/plan/published_runs.csv is one")
    from headway.cli.accuracy_view import against_lines
    from headway.cli.text import print_json
    from headway.plan.accuracy.score import as_json, score_file

    with _progress() as tell:
        found = score_file(file, calibrate, seed, tell)
    if json:
        print_json(as_json(found))
    else:
        print("\n".join(against_lines(found)))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere nothing, since all of this takes seconds."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
