"""The recipe schema: every section, field, unit and allowed range.

Objects are frozen. Derived fields (such as the head size) are filled in at construction, so that a resolved recipe
shows every number in use.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from headway.recipe.data import Data
from headway.recipe.diffusion import DiffusionObjective
from headway.recipe.families import AnyModel
from headway.recipe.families.diffusion import DiffusionModel
from headway.recipe.families.llama import Llama
from headway.recipe.inference import Inference
from headway.recipe.lora import Lora
from headway.recipe.objective import AnyObjective, Distill, Pretrain, Reward
from headway.recipe.own_code import OWN_NAME
from headway.recipe.policy import PolicyGradient, derived_correction
from headway.recipe.rl import Rl
from headway.recipe.sample_settings import SampleGrid
from headway.recipe.section import DERIVED, NotNegative, Positive, Section
from headway.recipe.track import Track
from headway.recipe.train import Train

__all__ = ["Checkpoint", "Data", "Eval", "Health", "Inference", "Lora", "Parallel", "Recipe", "Store", "Train"]


ContextAttention = Literal["all-gather", "all-to-all", "ring"]
"""How workers attend to parts of a sequence that others have."""


class Parallel(Section):
    """The device mesh; its axes except `expert` multiply to the number of workers."""

    replicate: Positive = 1
    """Replicas of the model (data parallel)."""
    shard: Positive | None = None
    """Workers that weights, gradients and optimizer state are sharded over (FSDP); by default all remaining ones."""
    tensor: Positive = 1
    """Workers that each matrix is split over (tensor parallel)."""
    pipeline: Positive = 1
    """Workers that layers are split over (pipeline parallel)."""
    context: Positive = 1
    """Workers that each sequence is split over (context parallel)."""
    context_attention: ContextAttention | None = None
    """How they attend to each other's parts; by default as planned."""
    expert: Positive = 1
    """Workers that a layer's experts are split over (expert parallel); this axis overlaps the others."""
    keep_weights: bool | None = None
    """Keep a block's gathered weights from its forward to its backward pass; by default as planned."""
    reduce_each: bool | None = None
    """Reduce gradients over shards in every microbatch instead of accumulating them; by default as planned."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Pipeline schedule."""
    chunks: Positive = DERIVED
    """Pipeline stages per worker; by default 2 for an interleaved schedule, else 1."""
    stages: tuple[Positive, ...] | None = None
    """Blocks of each stage, from the first; by default as planned, or as even as possible."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("chunks") is None:
            values = {**values, "chunks": 2 if values.get("schedule") == "interleaved" else 1}
        return values

    @property
    def splits_model(self) -> bool:
        """Whether an axis splits the model or its sequences, not only state and batch."""
        return self.tensor * self.pipeline * self.context * self.expert > 1

    def sizes(self, workers: int) -> dict[str, int]:
        """Return the size of each axis for a number of workers; that of `expert` lies within `shard`."""
        given = {axis: getattr(self, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
        others = math.prod(size for size in given.values() if size is not None)
        sizes = {axis: workers // others if size is None else size for axis, size in given.items()}
        return sizes | {"expert": self.expert}


class Eval(Section):
    """When to measure the loss on held-out windows, and scores on tasks."""

    every_steps: NotNegative = 0
    """Evaluate every N steps and after the last; 0 never."""
    windows: Positive = 64
    """Most held-out windows to use."""
    tasks: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tasks to evaluate as `headway eval` does: task files (.toml), data files, or names such as gsm8k."""
    tasks_every_steps: NotNegative = 0
    """Evaluate the tasks every N steps and after the last; 0: only after the last."""
    tasks_limit: Positive | None = None
    """Ask only the first N questions of each task."""
    tasks_data: str | None = None
    """Folder of the data of named tasks."""
    samples: SampleGrid | None = None
    """Images or video to generate with a diffusion model."""


class Store(Section):
    """An object store that checkpoints are also put into."""

    url: Annotated[str, Field(min_length=1)]
    """s3://bucket/prefix, gs://, az:// or file://; the run's name is added. Credentials come from the environment."""
    every_steps: NotNegative = 1000
    """Upload every N steps; the last step is always uploaded. 0: only the last."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep there."""
    keep_every_steps: NotNegative = 0
    """Also keep checkpoints there whose step is a multiple of this; 0 keeps none of them."""


class Checkpoint(Section):
    """When to make the state durable, and what to keep."""

    every_steps: NotNegative | Literal["auto"] = 100
    """Save to disk every N steps; the last step is always saved. 0: only the last. "auto": the interval with the least
    expected overhead, from the measured cost of a save and the failure rate."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every_steps: NotNegative = 0
    """Also keep checkpoints whose step is a multiple of this; 0 keeps none of them."""
    memory_every_steps: NotNegative = 0
    """Also hold a snapshot in the agent's memory every N steps, to resume from after a worker died. Saves to disk are
    held too. 0: only those."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Host memory for snapshots and pending saves, in GB; by default two states, or one where two would take more than
    half of the free memory. A save without room is skipped and recorded."""
    hours_between_failures: Annotated[float, Field(gt=0)] | None = None
    """Mean hours between failures of one device, for "auto"; by default that of a large published run, updated by this
    run's own failures."""
    retry_s: Annotated[float, Field(ge=0)] = 60.0
    """How long to retry the last save when the disk or store fails; other failed saves are skipped and recorded."""
    outage_s: Annotated[float, Field(ge=0)] = 600.0
    """How long to train on while records cannot be written (disk full, file system gone) before the run saves where it
    can and stops with status 75. As long, the last save and restarts wait for a folder that vanished."""
    store: Store | None = None
    """An object store that checkpoints are also put into."""


class Health(Section):
    """What counts as bad numerics, how often replicas are compared, and what to do when a replay does not help."""

    spike_z: Annotated[float, Field(ge=0)] = 50.0
    """Robust standard deviations above recent losses at which a loss is a spike; 0 disables detection."""
    spike_window: Positive = 64
    """Number of recent losses to compare with; detection starts after as many steps."""
    if_not_finite: Literal["stop", "skip", "lower-rate"] = "stop"
    """What to do when a non-finite loss or gradient norm recurs in a replay: stop, skip the step's samples, or lower
    the learning rate from that step on."""
    if_spike: Literal["go-on", "stop", "skip", "lower-rate"] = "go-on"
    """What to do when a spike recurs in a replay; "go-on" accepts it."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which "lower-rate" reduces the learning rate."""
    compare_every_steps: NotNegative = 100
    """Compare the parameters of replicas bitwise every N steps and before every save; 0 never."""


class OwnCallback(Section):
    """A callback class of your own, which worker 0 calls after steps and evaluations."""

    class_: Annotated[str, Field(alias="class", pattern=OWN_NAME)]
    """`package.module:Class`, importable where the run runs; see docs/guides/own-code.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""

    @model_serializer(mode="wrap")
    def _by_alias(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"class" if key == "class_" else key: value for key, value in handler(self).items()}


class Recipe(Section):
    """What to train: one complete object, from TOML or from Python."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Runs are named after it."""
    seed: NotNegative = 0
    """Seed of the weights, the data order and everything else random."""
    model: AnyModel = Field(default_factory=Llama)
    """The decoder to train."""
    data: Data
    """The dataset to train on."""
    objective: AnyObjective = Field(default_factory=Pretrain)
    """What to minimize."""
    train: Train = Field(default_factory=Train)
    """How to train."""
    rl: Rl | None = None
    """How the answers that a policy objective learns from are sampled and scored."""
    lora: Lora | None = None
    """Train low-rank adapters on a frozen base; without this section all weights are trained."""
    parallel: Parallel | None = None
    """The device mesh; without this section the plan decides."""
    eval: Eval = Field(default_factory=Eval)
    """When to measure the loss on held-out windows, and scores on tasks."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When to make the state durable, and what to keep."""
    health: Health = Field(default_factory=Health)
    """What counts as numbers gone wrong, and what to do then."""
    inference: Inference = Field(default_factory=Inference)
    """How the model and engines in the run compute tokens."""
    callbacks: tuple[OwnCallback, ...] = ()
    """Classes of your own that are told about steps and evaluations."""
    track: Track | None = None
    """Other trackers that get the run's metrics while it trains: MLflow, Weights & Biases, TensorBoard, a webhook."""

    def compiles(self, device: str) -> bool:
        """Whether blocks are compiled on a kind of device; by default those of built-in families on GPUs."""
        if self.train.compile is not None:
            return self.train.compile
        if self.inference.exact:
            return False
        splits_backward = self.parallel is not None and self.parallel.schedule == "zero-bubble"
        return device == "cuda" and self.model.class_ is None and not splits_backward

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        correction = derived_correction(values.get("objective"), values.get("rl"))
        if correction is None:
            return values
        return {**values, "objective": {**values["objective"], "correction": correction}}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.mup_base is not None and self.train.optimizer not in ("adamw", "adamw-8bit"):
            raise ValueError(f"model.mup_base needs train.optimizer adamw or adamw-8bit, not {self.train.optimizer}")
        if self.lora is not None:
            _check_lora(self, self.lora)
        if self.inference.exact:
            _check_exact(self)
        if isinstance(self.objective, Reward):
            _check_reward(self)
        elif self.model.reward:
            raise ValueError(f"model.reward needs objective.kind = reward, not {self.objective.kind}")
        if isinstance(self.objective, Distill) and self.model.class_ is not None:
            raise ValueError("objective distill needs one of Headway's decoders, not model.class")
        _check_rl(self)
        _check_diffusion(self)
        if self.train.fp8 is not None:
            _check_fp8(self)
        return self


def _check_diffusion(recipe: Recipe) -> None:
    """Raise for settings that diffusion needs or excludes."""
    objective, model, kind = recipe.objective, recipe.model, recipe.data.kind
    if not isinstance(objective, DiffusionObjective):
        if isinstance(model, DiffusionModel):
            wrong, hint = (
                f"model.family {model.family} needs a diffusion objective",
                "--set objective.kind=flow, or ddpm",
            )
            raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
        if kind != "text":
            raise ValueError(f"data.kind is {kind}, but objective {objective.kind} is for text")
        if recipe.eval.samples is not None:
            raise ValueError(f"[eval.samples] has no effect with objective {objective.kind}")
        return
    if not isinstance(model, DiffusionModel):
        wrong, hint = (
            f"objective {objective.kind} needs a diffusion model, not {model.family}",
            "--set model.family=dit",
        )
        raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
    if kind == "text":
        wrong, hint = f"objective {objective.kind} needs images or video", "--set data.kind=image, or video"
        raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
    if recipe.eval.tasks:
        raise ValueError("eval.tasks needs a model that predicts tokens: leave it out")
    if recipe.parallel is not None and recipe.parallel.pipeline > 1:
        raise ValueError("a diffusion model has no pipeline axis: use shard, replicate and tensor axes")
    samples = recipe.eval.samples
    allowed = ("euler", "heun") if objective.kind == "flow" else ("ddim", "ancestral")
    if samples is not None and samples.sampler not in (None, *allowed):
        raise ValueError(f"eval.samples.sampler is {samples.sampler}, but {objective.kind} has {' and '.join(allowed)}")
    if samples is not None and samples.prompts and model.conditioning == "class":
        raise ValueError("eval.samples.prompts has no effect with model.conditioning = class")


def _check_rl(recipe: Recipe) -> None:
    """Raise for settings that reinforcement learning needs or excludes."""
    objective, rl = recipe.objective, recipe.rl
    if not isinstance(objective, PolicyGradient):
        if rl is not None:
            raise ValueError(f"[rl] has no effect with objective.kind = {objective.kind}: use grpo or another policy")
        return
    if rl is None:
        wrong, hint = f"objective {objective.kind} needs a section [rl]", "--set rl.rewards='[\"math\"]'"
        raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
    if recipe.model.class_ is not None:
        raise ValueError(f"objective {objective.kind} needs one of Headway's decoders, not model.class")
    if rl.max_tokens >= recipe.data.seq:
        raise ValueError(
            f"rl.max_tokens is {rl.max_tokens}, but data.seq, which holds prompt and answer, is {recipe.data.seq}"
        )
    if recipe.train.batch_ramp:
        raise ValueError(f"train.batch_ramp has no effect with objective {objective.kind}")
    if rl.samples == 1 and objective.advantage != "batch":
        raise ValueError(f'rl.samples is 1, but advantage = "{objective.advantage}" compares answers: use 2 or more')


def _check_fp8(recipe: Recipe) -> None:
    """Raise for settings that float8 products exclude."""
    if recipe.model.class_ is not None:
        raise ValueError("[train.fp8] needs one of Headway's models, not model.class")
    if recipe.inference.exact:
        raise ValueError("[train.fp8] excludes inference.exact: engines multiply in bfloat16")
    if recipe.rl is not None:
        raise ValueError("[train.fp8] excludes [rl]: the engine that samples answers multiplies in bfloat16")
    if recipe.lora is not None and recipe.lora.quantize is not None:
        raise ValueError(f'[train.fp8] excludes lora.quantize = "{recipe.lora.quantize}": the base has no matrices')


def _check_exact(recipe: Recipe) -> None:
    """Raise for settings that exact inference excludes."""
    if recipe.model.class_ is not None:
        raise ValueError("inference.exact needs one of Headway's decoders, not model.class")
    if recipe.parallel is not None and recipe.parallel.splits_model:
        raise ValueError("inference.exact needs a mesh of replicate and shard axes only")
    if recipe.train.compile:
        raise ValueError("inference.exact needs train.compile = false: a compiler adds up in an order of its own")


def _check_reward(recipe: Recipe) -> None:
    """Raise for settings that a reward model excludes."""
    if recipe.model.class_ is not None:
        raise ValueError("objective reward needs one of Headway's decoders, not model.class")
    if recipe.lora is not None:
        raise ValueError("objective reward trains a head, which adapters do not have: leave [lora] out")
    if recipe.eval.tasks:
        raise ValueError("eval.tasks needs a model that predicts tokens, and objective reward has none: leave it out")


def _check_lora(recipe: Recipe, lora: Lora) -> None:
    """Raise for settings that adapters exclude."""
    if recipe.model.class_ is not None:
        raise ValueError("lora needs one of Headway's decoders, not model.class")
    if recipe.model.init is None:
        wrong, hint = "lora needs a base, but model.init is not set", "--set model.init=FOLDER, or a run"
        raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
    if recipe.train.freeze:
        raise ValueError("train.freeze has no effect with lora: the base is frozen, and lora.targets gets adapters")
    if recipe.train.master:
        raise ValueError("train.master has no effect with lora: adapters are float32")
    if lora.quantize is not None and recipe.parallel is not None and recipe.parallel.splits_model:
        raise ValueError(f'lora.quantize = "{lora.quantize}" needs a mesh of replicate and shard axes only')
