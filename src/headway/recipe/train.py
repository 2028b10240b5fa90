"""How to train: the length, the batch, the learning rate, the optimizer, the precision of what it keeps."""

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from headway.recipe.section import DERIVED, NotNegative, Positive, Section

__all__ = ["Optimizer", "ParameterGroup", "Train"]

Optimizer = Literal["adamw", "muon", "adamw-8bit", "adafactor"]
Operation = Literal["attention", "experts", "rms_norm", "rope", "gated", "loss", "adamw", "norm", "newton_schulz"]
"""What has kernels of its own."""
Pattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*]+(\.[A-Za-z0-9_*]+)*$")]
"""Names of parameters: `*` stands for any one part, or some letters of one; `**` for any number of parts."""
Decay = Annotated[float, Field(ge=0, le=10)]


class ParameterGroup(Section):
    """Parameters that are updated in a way of their own; of several groups that match, the first counts."""

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Names of parameters; `*` stands for any one part of a name, `**` for any number of them."""
    rate: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """What the learning rate is multiplied by."""
    weight_decay: Decay | None = None
    """Their decoupled weight decay; by default what they would have had."""

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not set: a table inside of a list has no place for comments."""
        return {key: value for key, value in handler(self).items() if value is not None}


def _rising(ramp: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Steps of a ramp, each after the one before."""
    for (before, _), (step, _) in pairwise(ramp):
        if step <= before:
            raise ValueError(f"step {step} does not come after step {before}")
    if ramp and ramp[0][0] < 2:
        raise ValueError("the ramp's first step is 2 at the earliest: train.batch says what a run begins with")
    return ramp


def _renamed(train: Any) -> Any:
    """A train section as version 0.1 wrote it, with today's names."""
    if not isinstance(train, dict) or "checkpoint_activations" not in train:
        return train
    train = dict(train)
    old = train.pop("checkpoint_activations")
    return {"recompute": {None: None, True: "full", False: "none"}.get(old, old), **train}


class Train(Section):
    """How to train: the length, the batch, the optimizer, the precision."""

    steps: Positive = 1000
    """Optimizer updates in the whole run."""
    batch: Positive = 32
    """Sequences in one step, over all workers together; never depends on how many there are."""
    batch_ramp: Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_rising)] = ()
    """(step, sequences): from this step on the batch is of so many sequences."""
    microbatch: Positive | None = None
    """Sequences a worker puts through the model at once; by default its whole share of the batch, or as planned."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where a cosine, a linear schedule or a decay ends, as a share of lr."""
    warmup_steps: NotNegative = DERIVED
    """Steps over which the learning rate rises from zero; by default a tenth of the steps, 100 at most."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-root"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd stays at lr and falls in the last `decay_steps`, inverse-root
    falls with the root of the steps done."""
    decay_steps: Positive | None = None
    """The last steps of wsd, in which the rate falls; by default a tenth of the steps."""
    decay: Literal["linear", "sqrt", "cosine"] | None = None
    """How the rate falls in them: by default "sqrt", one minus the root of the share that is done."""
    rate_cuts: tuple[tuple[Positive, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    """(step, factor): from this step on the learning rate is multiplied by the factor."""
    optimizer: Optimizer = "adamw"
    """What makes an update of gradients. Muon takes the matrices inside blocks, and AdamW the rest; adamw-8bit keeps
    moments in eight bits; adafactor keeps a mean of squares for each row and column only."""
    weight_decay: Decay = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's square."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """AdamW's guard against division by zero."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Muon's decay of the gradient's mean; by default 0.95."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with a rate or a weight decay of their own."""
    freeze: tuple[Pattern, ...] = ()
    """Names of parameters that stay as they are; `*` stands for any one part, `**` for any number of them."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep a float32 average of the weights, this much of which stays in each step (0.999, say)."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Times the squared logarithm of each token's sum of exponentials, added to its loss: keeps logits near zero."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the matrix products."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Precision in which parameters are kept; bfloat16 ones are rounded stochastically, unless `master` keeps more."""
    master: bool = False
    """Keep a float32 copy of each bfloat16 weight beside it, which updates are made on."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's moments and of Muon's momentum; bfloat16 ones are rounded stochastically."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs there are, else the CPU."""
    recompute: Literal["none", "selective", "full"] | None = None
    """What a block computes again in the backward pass instead of keeping it: nothing, all but the results of
    products, or everything; by default as planned."""
    recompute_blocks: NotNegative | None = None
    """How many of a worker's blocks do so; by default all, or as many as `memory_gb` asks for."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of its device that a worker may use, in GiB: the plan recomputes as little as that allows; by default
    all there is."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in the host's memory, and bring them to the device for each step."""
    update_in_backward: bool = False
    """Update each block as soon as its gradients are there, so that they need no memory for long; on one worker, in one
    pass a step, and without clipping."""
    compile: bool | None = None
    """Compile each block with torch.compile; by default on GPUs, but for a class of one's own and for zero-bubble."""
    cuda_graphs: bool | None = None
    """Record the passes of a step on one GPU once and replay them, which spares the host most of its work; by default
    where blocks are compiled and so small that the host would not keep up. Elsewhere it has no effect."""
    plain: tuple[Operation, ...] = ()
    """Operations that plain PyTorch does, and no kernel of their own; `headway kernels` lists them."""
    deterministic: bool = False
    """Refuse operations whose result can differ from one run to the next (GPUs; the CPU has none here)."""
    restarts: NotNegative = 3
    """How often in a row the agent starts again by itself after a worker died without progress between; 0 never."""
    fewest_workers: Positive = 1
    """With how few workers a run on several nodes goes on after it has lost some, in the same batches; with fewer it
    waits for another node."""
    silent_node_s: Annotated[float, Field(ge=2)] = 5.0
    """A node that says nothing for so long is lost; nodes that hear nothing of the one that leads for 1.6 times as long
    look for another. More for machines or networks that stand still now and then."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker waits for the others in a collective before it gives up."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in what follows from the other numbers; leave mistakes for the fields' own checks."""
        if not isinstance(values, dict):
            return values
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than steps ({self.steps}): set both")
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) are more than steps "
                f"({self.steps})"
            )
        for key, speaks, of in self._says():
            if not speaks and getattr(self, key) != type(self).model_fields[key].default:
                raise PydanticCustomError("at_key", "train.{key} has no effect with {of}", {"key": key, "of": of})
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError('weights = "bfloat16" needs dtype = "bfloat16": products cannot have more than weights')
        if self.offload_optimizer and (name := self._not_offloaded):
            raise ValueError(f"offload_optimizer needs float32 adamw, but {name}")
        if self.update_in_backward and (why := self._not_early):
            raise ValueError(f"update_in_backward {why}")
        return self

    def _says(self) -> list[tuple[str, bool, str]]:
        """Keys that only some choices give a meaning: whether these do, and what they are said of."""
        name = self.optimizer
        adam = name != "adafactor"
        return [
            ("beta1", adam, name),
            ("beta2", adam, name),
            ("eps", adam, name),
            ("momentum", name == "muon", name),
            ("moments", name in ("adamw", "muon"), f"{name}, which keeps none of such a kind"),
            ("master", self.weights == "bfloat16", "float32 weights, which are their own"),
            ("decay", self.schedule == "wsd", f"a {self.schedule} schedule"),
            ("decay_steps", self.schedule == "wsd", f"a {self.schedule} schedule"),
        ]

    @property
    def _not_offloaded(self) -> str | None:
        """What keeps the optimizer's moments out of the host's memory."""
        kept = {"optimizer": "adamw", "weights": "float32", "moments": "float32"}
        return next(
            (f"{key} is {getattr(self, key)}" for key, value in kept.items() if getattr(self, key) != value), None
        )

    @property
    def _not_early(self) -> str | None:
        """What keeps updates out of the backward pass."""
        if self.clip:
            return f"needs clip = 0, and it is {self.clip:g}: the norm is known only when the first updates are made"
        if self.microbatch is not None and self.microbatch < max(self.batches):
            return (
                f"needs a step in one pass, and microbatch {self.microbatch} is less than {max(self.batches)} sequences"
            )
        return "does not go with offload_optimizer" if self.offload_optimizer else None

    def batch_at(self, step: int) -> int:
        """Sequences of update number `step`, from 1."""
        return next((batch for first, batch in reversed(self.batch_ramp) if step >= first), self.batch)

    @property
    def batches(self) -> tuple[int, ...]:
        """All sizes that a step's batch has in the course of the run, in their order."""
        ramp = [(1, self.batch), *self.batch_ramp]
        return tuple(batch for first, batch in ramp if first <= self.steps)

    def sequences(self, steps: int) -> int:
        """Sequences of the first so many steps together."""
        ramp = [(1, self.batch), *self.batch_ramp]
        ends = [first for first, _ in ramp[1:]] + [steps + 1]
        return sum(batch * max(0, min(end, steps + 1) - first) for (first, batch), end in zip(ramp, ends, strict=True))
