"""What `headway plan` is asked: options checked, a recipe resolved, the cluster and the cost model."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.cli.text import plural
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
from headway.plan.accuracy.score import read_cases
from headway.plan.architecture import Architecture
from headway.plan.costs import CostModel, Fidelity, make_cost_model
from headway.plan.efficiencies import Efficiencies, fitted_parameters
from headway.plan.hf_config import read_architecture
from headway.plan.plan import Plan
from headway.plan.plan import plan as make_plan
from headway.plan.settings import parse_mesh
from headway.plan.task import SearchSpace
from headway.recipe import Model, Recipe, Train, load_recipe
from headway.recipe.exactness import with_exactness
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.sample_tokens import with_sample_tokens
from headway.track import runs_root

POOR = 0.25
"""Mean error above which a calibration is reported as poor."""
FIDELITIES = ("limit", "default", "measured")
RANKS = ("time", "cost")
PRECISIONS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "float32", "fp32": "float32",
    "fp8": "fp8", "float8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
"""Values of --precision, and the planner's names of them."""
VOCABULARY = 4096
"""Of a dataset that is not built yet: the default of `headway data build`."""
VOCABULARY_MULTIPLE = 64
"""As training rounds it; repeated here since importing the agent takes longer than a plan."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan, as they were given."""

    recipe: Path
    on: str | None
    cluster: Path | None
    mesh: str | None
    settings: tuple[str, ...]
    fidelity: str | None
    ceilings: Path | None
    price: float | None
    rank: str
    precision: str | None
    model: Path | None
    calibrate_to: Path | None
    imbalance: float


@dataclass(frozen=True)
class PlanRequest:
    """The options of a plan, loaded and checked."""

    options: PlanOptions
    recipe: Recipe
    architecture: Architecture | None
    """Of the model that is planned instead of the recipe's."""
    cluster: Cluster
    fidelity: Fidelity
    efficiencies: Efficiencies | None
    """Calibrated ones."""
    ceilings: Ceilings | None
    precision: str | None

    def plan(self, cluster: Cluster, keep: int = 6) -> Plan:
        """Return the best plan for a cluster."""
        mesh = parse_mesh(self.options.mesh) if self.options.mesh else None
        rank: Any = self.options.rank
        return make_plan(
            self.recipe,
            cluster,
            fidelity=self.fidelity,
            parameters=self.efficiencies,
            ceilings=self.ceilings,
            arch=self.architecture,
            imbalance=self.options.imbalance,
            choices=SearchSpace(mesh=mesh, precisions=(self.precision,) if self.precision else None),
            rank=rank,
            price=self.options.price,
            keep=keep,
        )

    @property
    def train_command(self) -> str:
        """The command that trains as planned; empty if the model is not the recipe's."""
        if self.architecture is not None:
            return ""
        settings = [*self.options.settings]
        if self.precision == "fp8" and self.recipe.train.fp8 is None:
            settings += ["train.dtype=bfloat16"] if self.recipe.train.dtype != "bfloat16" else []
            settings.append("train.fp8.scaling=tensorwise")
        sets = (f"--set {shlex.quote(setting)}" for setting in settings)
        mesh = [f"--mesh {shlex.quote(self.options.mesh)}"] if self.options.mesh else []
        return " ".join(["headway train", str(self.options.recipe), *mesh, *sets])

    def costs(self) -> CostModel:
        """Return the cost model of the plan."""
        return make_cost_model(self.cluster, self.fidelity, self.efficiencies, self.ceilings)


def load_request(options: PlanOptions) -> PlanRequest:
    """Load what the options name; UsageError for what does not go together."""
    one_of("--rank", options.rank, RANKS)
    fidelity = one_of("--fidelity", options.fidelity or ("measured" if options.ceilings else "default"), FIDELITIES)
    precision = None
    if options.precision:
        precision = PRECISIONS[one_of("--precision", options.precision, tuple(PRECISIONS))]
    checked_price(options.price)
    recipe, architecture = _recipe_and_architecture(options)
    efficiencies = None
    if options.calibrate_to is not None:
        if fidelity == "limit":
            raise UsageError("--fidelity limit cannot be calibrated", hint="leave out --fidelity or --calibrate-to")
        efficiencies, fidelity = _calibrated(options.calibrate_to), "calibrated"
    cluster = cluster_of(options.on, options.cluster, recipe.train.device)
    recipe = with_exactness(recipe, "cpu" if cluster.chip.name == "cpu" else "cuda")
    if options.fidelity is None and fidelity == "default" and find_ceilings(cluster.chip) is not None:
        fidelity = "measured"  # the best available
    ceilings = _ceilings(options.ceilings, fidelity, cluster)
    if precision:
        cluster.chip.peak(precision)  # raises for unknown ones
    return PlanRequest(options, recipe, architecture, cluster, fidelity, efficiencies, ceilings, precision)


def _recipe_and_architecture(options: PlanOptions) -> tuple[Recipe, Architecture | None]:
    """Return the recipe, resolved, or named after the model that is planned instead of its own."""
    recipe = load_recipe(options.recipe, options.settings)
    if options.model is None:
        return resolved(recipe), None
    architecture = read_architecture(options.model)
    name = options.model.resolve().parent.name if options.model.name == "config.json" else options.model.stem
    return recipe.model_copy(update={"name": name or "model"}), architecture


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


def one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    """Return the value of an option, if it is a known one."""
    if value not in known:
        raise UsageError(f"unknown {option} {value}", hint=f"choose from {', '.join(known)}")
    return value


def checked_price(price: float | None) -> float | None:
    """Return a price that can be one."""
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"invalid --price {price:g}", hint="dollars per device-hour, e.g. 2.50")
    return price


def cluster_of(on: str | None, file: Path | None, device: Literal["auto", "cpu", "cuda"]) -> Cluster:
    """Return the cluster of the options; without any, this machine."""
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


def resolved(recipe: Recipe) -> Recipe:
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
