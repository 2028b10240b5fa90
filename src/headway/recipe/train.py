"""The train section of a recipe: length, batch, learning rate, optimizer, precision."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from headway.recipe.fp8 import Fp8
from headway.recipe.patterns import Pattern
from headway.recipe.section import DERIVED, NotNegative, Positive, Section

Optimizer = Literal["adamw", "muon", "adamw-8bit", "adafactor"]
Operation = Literal[
    "attention", "experts", "rms_norm", "rope", "gated", "modulation", "heads", "gelu", "loss", "adamw", "norm",
    "newton_schulz", "fp8",
]  # fmt: skip
"""Operations with custom kernels."""
Recompute = Literal["none", "selective", "except-attention", "full"]
Decay = Annotated[float, Field(ge=0, le=10)]


class ParameterGroup(Section):
    """Parameters with their own update settings; of several groups that match, the first counts."""

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Parameter names; `*` matches one part of a name, `**` any number of parts."""
    rate: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Factor of the learning rate."""
    weight_decay: Decay | None = None
    """Their decoupled weight decay; by default unchanged."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize without unset fields: a TOML table inside a list has no place for comments."""
        return {key: value for key, value in handler(self).items() if value is not None}


def _check_ramp(ramp: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Check that the steps of a ramp ascend from 2."""
    for (before, _), (step, _) in pairwise(ramp):
        if step <= before:
            raise ValueError(f"step {step} is not after step {before}")
    if ramp and ramp[0][0] < 2:
        raise ValueError("the ramp must start at step 2 or later: train.batch is the batch at step 1")
    return ramp


def _renamed(train: Any) -> Any:
    """Rename keys of a train section written by version 0.1."""
    if not isinstance(train, dict) or "checkpoint_activations" not in train:
        return train
    train = dict(train)
    old = train.pop("checkpoint_activations")
    return {"recompute": {None: None, True: "full", False: "none"}.get(old, old), **train}


def _without_steps(values: dict[str, Any]) -> dict[str, Any]:
    """Return a section that has epochs without what only steps can tell."""
    if values.get("steps") is not None:
        hint = "--set train.epochs= to train for steps, or --set train.steps= to train for epochs"
        wrong = "steps and epochs exclude each other"
        raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
    unknown = ("steps", "warmup_steps", "decay_steps")
    return {key: value for key, value in values.items() if value is not None or key not in unknown}


class Train(Section):
    """How to train: length, batch, optimizer, precision."""

    steps: Positive = 1000
    """Optimizer updates in the whole run."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Length of the run in passes over the training data, instead of `steps`, which then follow when a run starts."""
    batch: Positive = 32
    """Sequences per step over all workers; never depends on the number of workers."""
    batch_ramp: Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_check_ramp)] = ()
    """(step, sequences) pairs: the batch from this step on."""
    microbatch: Positive | None = None
    """Sequences per forward pass of a worker; by default its whole share of the batch, or as planned."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate of a cosine, linear or wsd schedule, as a fraction of lr."""
    warmup_steps: NotNegative = DERIVED
    """Steps of linear warm-up from zero; by default a tenth of the steps, at most 100."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-root"] = "cosine"
    """Learning rate schedule after the warm-up; wsd (warmup-stable-decay) stays at lr and decays in the last
    `decay_steps`, inverse-root decays with the square root of the step."""
    decay_steps: Positive | None = None
    """Length of the decay of wsd; by default a tenth of the steps."""
    decay: Literal["linear", "sqrt", "cosine"] | None = None
    """Shape of that decay; by default "sqrt": one minus the square root of its progress."""
    rate_cuts: tuple[tuple[Positive, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    """(step, factor) pairs: the learning rate is multiplied by the factor from this step on."""
    optimizer: Optimizer = "adamw"
    """The optimizer. muon updates the matrices inside blocks with Muon, the rest with AdamW; adamw-8bit stores moments
    in eight bits; adafactor stores second moments by row and column only."""
    weight_decay: Decay = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the second moment."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Added to AdamW's denominator."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Muon's momentum; by default 0.95."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with their own learning rate or weight decay."""
    freeze: tuple[Pattern, ...] = ()
    """Names of frozen parameters; `*` matches one part, `**` any number of parts."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a float32 exponential moving average of the weights (for example 0.999); by default none is stored."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Clip gradients to this global norm; 0 disables clipping."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the z-loss, the squared log-sum-exp of each token's logits: keeps logits near zero."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the matrix products."""
    fp8: Fp8 | None = None
    """Multiply linear layers in float8; without this section none are."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Precision of stored parameters; bfloat16 ones are rounded stochastically, unless `master` is set."""
    master: bool = False
    """Keep float32 master copies of bfloat16 weights."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's moments and of Muon's momentum; bfloat16 ones are rounded stochastically."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto uses GPUs if there are any, else the CPU."""
    recompute: Recompute | None = None
    """Activation recomputation in the backward pass: none, selective (everything but matrix products and attention),
    except-attention (for long sequences) or full; by default as planned."""
    recompute_blocks: NotNegative | None = None
    """How many of a worker's blocks recompute; by default all, or as many as `memory_gb` requires."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Device memory per worker, in GiB: the plan recomputes as little as that allows; by default all."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory, and copy them to the device for each step."""
    update_in_backward: bool = False
    """Update each block during the backward pass, as soon as its gradients are ready, to save their memory; needs one
    worker, one microbatch per step, and no clipping."""
    compile: bool | None = None
    """Compile each block with torch.compile; by default on GPUs, except for custom classes and zero-bubble."""
    cuda_graphs: bool | None = None
    """Capture the passes of a step in CUDA graphs, which saves most host work on a single GPU; by default where blocks
    are compiled and too small for the host to keep up. No effect elsewhere."""
    plain: tuple[Operation, ...] = ()
    """Operations to run in plain PyTorch instead of custom kernels; `headway kernels` lists them."""
    deterministic: bool = False
    """Refuse nondeterministic operations (on GPUs; there are none on the CPU)."""
    restarts: NotNegative = 3
    """Most automatic restarts in a row without progress between failures; 0 never restarts."""
    fewest_workers: Positive = 1
    """Fewest workers with which a multi-node run continues after losing some, with the same batches; with fewer it
    waits for another node."""
    silent_node_s: Annotated[float, Field(ge=2)] = 5.0
    """A node that is silent for this long is lost; if the leader is silent for 1.6 times as long, the nodes elect
    another. Raise it for machines or networks that stall at times."""
    join_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a multi-node run waits for the nodes that its workers need after the first one has joined; then it fails
    and names those that are missing. The first may take ten minutes."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of a collective."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in derived fields; leave invalid values for validation."""
        if not isinstance(values, dict):
            return values
        if values.get("epochs") is not None:
            return _renamed(_without_steps(values))
        values, steps = dict(values), values.get("steps", 1000)
        counts = steps if isinstance(steps, int) else 0
        derived: dict[str, Any] = {"warmup_steps": min(100, counts // 10)}
        if values.get("schedule") == "wsd":
            derived |= {"decay_steps": max(1, counts // 10), "decay": "sqrt"}
        if values.get("update_in_backward") is True and isinstance(values.get("batch", 32), int):
            derived |= {"microbatch": values.get("batch", 32)}
        if values.get("optimizer") == "muon":
            derived |= {"momentum": 0.95}
        return _renamed(values | {key: value for key, value in derived.items() if values.get(key) is None})

    def _shorter(self, *keys: str) -> str:
        """Return the options that shorten parts of the schedule to what they are by default for this many steps."""
        tenth = self.steps // 10
        lengths = {"warmup_steps": min(100, tenth), "decay_steps": max(1, tenth)}
        return " ".join(f"--set train.{key}={lengths[key]}" for key in keys)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.epochs is None:
            self._check_lengths()
        for key, applies, choice in self._conditional_keys():
            if not applies and getattr(self, key) != type(self).model_fields[key].default:
                raise PydanticCustomError("at_key", "train.{key} has no effect with {of}", {"key": key, "of": choice})
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError('weights = "bfloat16" needs dtype = "bfloat16"')
        if self.fp8 is not None and self.dtype != "bfloat16":
            wrong = f'[train.fp8] needs train.dtype = "bfloat16", not "{self.dtype}"'
            hint = "--set train.dtype=bfloat16"
            raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})
        if self.offload_optimizer and (name := self._not_offloaded):
            raise ValueError(f"offload_optimizer needs float32 adamw, but {name}")
        if self.update_in_backward and (why := self._why_not_in_backward):
            raise ValueError(f"update_in_backward {why}")
        return self

    def _check_lengths(self) -> None:
        """Check that the parts of the schedule fit into the steps."""
        if self.warmup_steps >= self.steps:
            wrong = f"warmup_steps ({self.warmup_steps}) must be less than steps ({self.steps})"
            raise PydanticCustomError(
                "needs_setting", "{wrong}", {"wrong": wrong, "hint": self._shorter("warmup_steps")}
            )
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.steps:
            wrong = (
                f"warmup_steps ({self.warmup_steps}) plus decay_steps ({self.decay_steps}) exceed steps ({self.steps})"
            )
            fits = self.warmup_steps + max(1, self.steps // 10) <= self.steps
            hint = self._shorter("decay_steps") if fits else self._shorter("warmup_steps", "decay_steps")
            raise PydanticCustomError("needs_setting", "{wrong}", {"wrong": wrong, "hint": hint})

    @model_serializer(mode="wrap")
    def _without_unknown_steps(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize `epochs` or `steps`, whichever is set."""
        values: dict[str, Any] = handler(self)
        if self.epochs is None:
            return {key: value for key, value in values.items() if key != "epochs"}
        return _without_steps({key: value for key, value in values.items() if key != "steps"})

    def with_steps(self, steps: int) -> "Train":
        """Return the section with the steps that its epochs are, and what is derived from them."""
        return Train.model_validate({**self.model_dump(exclude={"epochs"}), "epochs": None, "steps": steps})

    def _conditional_keys(self) -> list[tuple[str, bool, str]]:
        """Return keys that only some choices give a meaning: whether they apply, and the choice."""
        name = self.optimizer
        adam = name != "adafactor"
        return [
            ("beta1", adam, name),
            ("beta2", adam, name),
            ("eps", adam, name),
            ("momentum", name == "muon", name),
            ("moments", name in ("adamw", "muon"), name),
            ("master", self.weights == "bfloat16", "float32 weights"),
            ("decay", self.schedule == "wsd", f"a {self.schedule} schedule"),
            ("decay_steps", self.schedule == "wsd", f"a {self.schedule} schedule"),
        ]

    @property
    def _not_offloaded(self) -> str | None:
        """The setting that rules out optimizer offload, if any."""
        needed = {"optimizer": "adamw", "weights": "float32", "moments": "float32"}
        return next(
            (f"{key} is {getattr(self, key)}" for key, value in needed.items() if getattr(self, key) != value), None
        )

    @property
    def _why_not_in_backward(self) -> str | None:
        """The setting that rules out updates in the backward pass, if any."""
        if self.clip:
            return f"needs clip = 0, not {self.clip:g}: the norm is known only after the first updates"
        if self.microbatch is not None and self.microbatch < max(self.batches):
            return f"needs microbatch = batch ({max(self.batches)}), not {self.microbatch}"
        return "excludes offload_optimizer" if self.offload_optimizer else None

    def batch_at(self, step: int) -> int:
        """Return the batch of a step, from 1."""
        return next((batch for first, batch in reversed(self.batch_ramp) if step >= first), self.batch)

    @property
    def batches(self) -> tuple[int, ...]:
        """All batch sizes of the run, in order."""
        ramp = [(1, self.batch), *self.batch_ramp]
        return tuple(batch for first, batch in ramp if first <= self.steps)

    def sequences(self, steps: int) -> int:
        """Return the number of sequences in the first `steps` steps."""
        ramp = [(1, self.batch), *self.batch_ramp]
        ends = [first for first, _ in ramp[1:]] + [steps + 1]
        return sum(batch * max(0, min(end, steps + 1) - first) for (first, batch), end in zip(ramp, ends, strict=True))
