"""What a recipe may say: every section, field, unit and allowed range.

Objects are frozen. Fields that follow from others (a head's size from the width) are filled in at
construction, so that a resolved recipe shows every number that will be used.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

__all__ = ["Checkpoint", "Data", "Eval", "Health", "Layout", "Model", "Parallel", "Recipe", "Train"]

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
DERIVED: Any = None
"""Default of a number that a section's `_derive` fills in from the others."""


def _round_up(value: float, multiple: int) -> int:
    return int(-(-value // multiple) * multiple)


class _Section(BaseModel):
    """Shared settings of all sections: frozen, closed to unknown keys, documented by docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


Module = Annotated[str, Field(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*(\.[A-Za-z0-9_*]+)*$")]
"""A module's dotted name inside a model; `*` stands for any one part: blocks.*.attention.out."""


class Layout(_Section):
    """How a model of your own is cut, by the names of its modules; `*` stands for any one part of a name.

    Sharding and copies need none of it. A pipeline needs `blocks`, `first` and `last`; a tensor axis needs `columns`,
    `rows` and, for embeddings and heads, `vocabulary`.
    """

    blocks: Module | None = None
    """The list of blocks, each taking the stream first and returning it: a pipeline cuts between them."""
    first: tuple[Module, ...] = ()
    """Modules that only a pipeline's first stage has: those that make the stream."""
    last: tuple[Module, ...] = ()
    """Modules that only its last stage has: those that make logits of the stream."""
    columns: tuple[Module, ...] = ()
    """Linear modules whose outputs are shared out: queries, keys, values, a feed-forward's first matrices."""
    rows: tuple[Module, ...] = ()
    """Linear modules whose inputs are shared out, and whose outputs are added up: those that follow `columns`."""
    vocabulary: tuple[Module, ...] = ()
    """Embeddings and the head, whose vocabulary is shared out; no worker then has all logits."""
    share: tuple[Module, ...] = ()
    """Modules that see a share of tokens or heads and hold all of their parameters, such as norms: gradients are added
    up."""
    whole: tuple[Module, ...] = ()
    """Modules that contain `columns` and need whole sequences, which are gathered for them; between them each worker
    then has a share of each sequence (sequence parallel)."""
    divide: tuple[Module, ...] = ()
    """Whole numbers among the modules' attributes that count what is shared out: blocks.*.attention.heads."""


def _plain(value: Any, name: str) -> Any:
    """What TOML and JSON both can say; tuples become lists, so that it reads back as it was."""
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{i}") for i, item in enumerate(value)]
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    why = f"is {value!r}: only numbers, strings, true and false, lists and tables go here"
    raise PydanticCustomError("at_key", "model.args.{key} {why}", {"key": name, "why": why})


def _arguments(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a class by name; one that is set to nothing is left to the class's own default."""
    for name in args:
        if not name.isidentifier():
            raise PydanticCustomError("at_key", "model.args.{key} {why}", {"key": name, "why": "is no argument's name"})
    return {name: _plain(value, name) for name, value in args.items() if value is not None}


class Model(_Section):
    """The decoder to train, in plain numbers; or a class of your own."""

    model_config = ConfigDict(populate_by_name=True)

    class_: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(default=None, alias="class")
    """A class of your own, as package.module:Class: a plain module that makes logits [B, L, V] of tokens [B, L]."""
    args: Annotated[dict[str, Any], AfterValidator(_arguments)] = {}
    """What that class is called with, by name."""
    layout: Layout | None = None
    """How that class is cut, for tensor and pipeline axes."""
    init: str | None = None
    """Start from these weights: a Hugging Face folder (its config.json then gives the shape), or RUN@STEP."""
    vocab_size: Positive | None = None
    """Rows of the embedding; by default the tokenizer's size rounded up to a multiple of 64."""
    layers: Positive = 4
    """Number of decoder blocks."""
    dim: Positive = 256
    """Width of the residual stream."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Positive = DERIVED
    """Number of key and value heads; by default as many as query heads."""
    head_dim: Positive = DERIVED
    """Size of one head; by default dim / heads."""
    hidden: Positive = DERIVED
    """Inner width of the SwiGLU feed-forward; by default 8/3 of dim rounded up to a multiple of 64."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Added to the mean square inside each RMSNorm."""
    tie_embeddings: bool = True
    """Use the input embedding as the output head too."""
    qk_norm: bool = False
    """Normalize each head's queries and keys before the rotary embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases on the feed-forward's projections."""
    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of freshly drawn weights."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in what follows from the other numbers; leave mistakes for the fields' own checks."""
        if not isinstance(values, dict):
            return values
        values = _of_one_kind(values)
        dim, heads = values.get("dim", 256), values.get("heads", 4)
        if isinstance(dim, int) and isinstance(heads, int) and dim > 0 and heads > 0:
            if values.get("kv_heads") is None:
                values["kv_heads"] = heads
            if values.get("head_dim") is None:
                values["head_dim"] = max(dim // heads, 1)
            if values.get("hidden") is None:
                values["hidden"] = _round_up(dim * 8 / 3, 64)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for the rotary embedding")
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what says something of this kind of model, under the names that a file has."""
        said = {"class" if key == "class_" else key: value for key, value in handler(self).items()}
        return {key: value for key, value in said.items() if _belongs(key, self.class_ is not None)}


def _belongs(key: str, to_a_class: bool) -> bool:
    """Whether a key says something of a class of the user's own, or of a decoder."""
    return key in ("class", "init") or (key in ("args", "layout")) == to_a_class


def _of_one_kind(values: dict[str, Any]) -> dict[str, Any]:
    """A model section without keys that are set to nothing; those of the other kind of model are refused."""
    given = {"class" if key == "class_" else key: value for key, value in values.items()}
    own = given.get("class") is not None
    for key in Model.model_fields:
        value = given.get(key)
        if key == "class_" or value in (None, {}) or _belongs(key, own):
            continue
        why = "a class of your own: put it into model.args" if own else "a decoder: model.class names your own"
        raise PydanticCustomError("at_key", "model.{key} says nothing of {why}", {"key": key, "why": why})
    # What was taken back leaves nothing behind; a decoder's own fields say themselves that they need a value.
    return {key: v for key, v in given.items() if v is not None or (_belongs(key, own) and key != "args")}


def _in_order(skip: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of samples that follow each other."""
    before = 0
    for first, end in skip:
        if first >= end:
            raise ValueError(f"[{first}, {end}] holds no sample: the second number is the first sample after the range")
        if first < before:
            raise ValueError(f"[{first}, {end}] begins before the range ahead of it ends, at {before}")
        before = end
    return skip


class Data(_Section):
    """Which tokens to train on, and how they are cut into sequences."""

    path: str
    """Folder made by `headway data build`."""
    version: str | None = None
    """Refuse to train on any other version of the data (a prefix of at least 8 characters is enough)."""
    seq: Positive = 1024
    """Tokens in one training sequence."""
    holdout: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    """Share of the windows kept out of training for evaluation; the same windows whatever the seed."""
    mask_boundaries: bool = False
    """Leave out of the loss each token that would be predicted from another document's end."""
    skip: Annotated[tuple[tuple[NotNegative, Positive], ...], AfterValidator(_in_order)] = ()
    """Samples of the order that are passed over, as [first, end) by their number in the run. A step whose batch would
    touch some of them begins after them."""


def _renamed(train: Any) -> Any:
    """A train section as version 0.1 wrote it, with today's names."""
    if not isinstance(train, dict) or "checkpoint_activations" not in train:
        return train
    train = dict(train)
    old = train.pop("checkpoint_activations")
    return {"recompute": {None: None, True: "full", False: "none"}.get(old, old), **train}


class Train(_Section):
    """How to train: the length, the batch, the optimizer, the precision."""

    steps: Positive = 1000
    """Optimizer updates in the whole run."""
    batch: Positive = 32
    """Sequences in one step, over all workers together; never depends on how many there are."""
    microbatch: Positive | None = None
    """Sequences a worker puts through the model at once; by default its whole share of the batch, or as planned."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the cosine ends, as a share of lr."""
    warmup_steps: NotNegative = DERIVED
    """Steps over which the learning rate rises from zero; by default a tenth of the steps, 100 at most."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    rate_cuts: tuple[tuple[Positive, Annotated[float, Field(gt=0, le=1)]], ...] = ()
    """(step, factor): from this step on the learning rate is multiplied by the factor."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the gradient's square."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """AdamW's guard against division by zero."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the matrix products; weights and optimizer stay in float32."""
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
    compile: bool = False
    """Compile each block with torch.compile."""
    deterministic: bool = False
    """Refuse operations whose result can differ from one run to the next (GPUs; the CPU has none here)."""
    restarts: NotNegative = 3
    """How often in a row the agent starts again by itself after a worker died without progress between; 0 never."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker waits for the others in a collective before it gives up."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("warmup_steps") is None:
            steps = values.get("steps", 1000)
            values = {**values, "warmup_steps": min(100, steps // 10) if isinstance(steps, int) else 0}
        return _renamed(values)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than steps ({self.steps})")
        return self


class Parallel(_Section):
    """How the workers are laid out: a mesh, whose axes but `expert` multiply to the workers there are."""

    replicate: Positive = 1
    """Copies of the whole, which exchange gradients."""
    shard: Positive | None = None
    """Workers that share weights, gradients and optimizer; by default all that the other axes leave."""
    tensor: Positive = 1
    """Workers that share each matrix of a layer."""
    pipeline: Positive = 1
    """Stages that layers are spread over."""
    context: Positive = 1
    """Workers that share each sequence."""
    expert: Positive = 1
    """Workers that share a layer's experts; they lie across the other axes."""
    keep_weights: bool | None = None
    """Keep a block's gathered weights from its forward pass to its backward pass; by default as planned."""
    reduce_each: bool | None = None
    """Add gradients up over shards in every microbatch, instead of keeping them whole to the last; by default as
    planned."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In which order a pipeline's stages work on microbatches."""
    chunks: Positive = DERIVED
    """Stages that each worker of an interleaved pipeline has; by default 2 of them, else 1."""
    stages: tuple[Positive, ...] | None = None
    """Blocks of each stage, from the first; by default as planned, or as even as can be."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("chunks") is None:
            values = {**values, "chunks": 2 if values.get("schedule") == "interleaved" else 1}
        return values

    def sizes(self, workers: int) -> dict[str, int]:
        """The axes of a mesh of so many workers."""
        given = {axis: getattr(self, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
        others = math.prod(size for size in given.values() if size is not None)
        return {axis: workers // others if size is None else size for axis, size in given.items()}


class Eval(_Section):
    """When to measure the loss on held-out windows."""

    every_steps: NotNegative = 0
    """Evaluate after each so many steps, and after the last; 0 never."""
    windows: Positive = 64
    """Held-out windows to use, at most as many as there are."""


class Store(_Section):
    """An object store that checkpoints are also put into."""

    url: Annotated[str, Field(min_length=1)]
    """s3://bucket/prefix, gs://, az:// or file://; the run's name is added. Credentials come from the environment."""
    every_steps: NotNegative = 1000
    """Upload after each so many steps; the last step always is. 0: only the last."""
    keep_last: Positive = 3
    """Newest checkpoints to keep there."""
    keep_every_steps: NotNegative = 0
    """Also keep there every checkpoint whose step is a multiple of this; 0 keeps none of them."""


class Checkpoint(_Section):
    """When to make the state durable, and what to keep."""

    every_steps: NotNegative | Literal["auto"] = 100
    """Save to disk after each so many steps; the last step is always saved. 0: only the last. "auto": as often as costs
    least, by what saves cost here and how often things fail."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every_steps: NotNegative = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none of them."""
    memory_every_steps: NotNegative = 0
    """Also keep the state in the agent's memory after each so many steps: a worker that died goes on from there. What
    goes to disk is kept as well. 0: only that."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of this machine for states that are kept or wait to be written, in GB; by default two states, or one where
    two would take more than half of what is free. A save that finds no room is left out and recorded."""
    hours_between_failures: Annotated[float, Field(gt=0)] | None = None
    """Hours of one device between its failures, for "auto"; by default what a large published run saw. What this run
    sees of failures itself counts too."""
    retry_s: Annotated[float, Field(ge=0)] = 60.0
    """How long the last save is tried again when the disk or the store refuses; others are left out and recorded."""
    store: Store | None = None
    """An object store that checkpoints are also put into."""


class Health(_Section):
    """What counts as numbers gone wrong, how often copies are compared, and what is done when going back does not
    help."""

    spike_z: Annotated[float, Field(ge=0)] = 50.0
    """How far above the last losses, in robust standard deviations, a loss is a spike; 0 looks for none."""
    spike_window: Positive = 64
    """Losses to compare with; as many must be there first."""
    if_not_finite: Literal["stop", "skip", "lower-rate"] = "stop"
    """What to do when a loss or gradient norm that is no number comes again after going back and replaying: stop, pass
    over the step's samples, or lower the learning rate from that step on."""
    if_spike: Literal["go-on", "stop", "skip", "lower-rate"] = "go-on"
    """What to do when a spike comes again after going back and replaying; going on takes it as it is."""
    rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What "lower-rate" multiplies the learning rate by."""
    compare_every_steps: NotNegative = 100
    """Compare the parameters of replicas bit for bit every so many steps, and before every save; 0 never."""


class Recipe(_Section):
    """What to train: one complete object, from TOML or from Python."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Runs are called after it."""
    seed: NotNegative = 0
    """Seed of the weights, the data order and everything else random."""
    model: Model = Field(default_factory=Model)
    """The decoder to train, in plain numbers."""
    data: Data
    """Which tokens to train on."""
    train: Train = Field(default_factory=Train)
    """How to train."""
    parallel: Parallel | None = None
    """How the workers are laid out; without this section the plan decides."""
    eval: Eval = Field(default_factory=Eval)
    """When to measure the loss on held-out windows."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When to make the state durable, and what to keep."""
    health: Health = Field(default_factory=Health)
    """What counts as numbers gone wrong, and what to do then."""
