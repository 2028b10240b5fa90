"""The model section of a recipe: the base of all decoder families, and custom model classes.

A family (`recipe/families/`) adds its own fields and describes, without torch, the names and shapes of its tensors,
their form in a Hugging Face folder, its config.json, its weight initialization and its cost. Its torch module is the
file of the same name in `models/`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from headway.recipe.architecture import Architecture
from headway.recipe.own_code import OWN_NAME
from headway.recipe.section import DERIVED, Positive, Section

Config = Mapping[str, Any]
"""A config.json."""
Shapes = dict[str, tuple[int, ...]]
"""Tensor shapes by name."""
Module = Annotated[str, Field(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*(\.[A-Za-z0-9_*]+)*$")]
"""A module's dotted name inside a model; `*` matches one part: blocks.*.attention.out."""


class ModelLayout(Section):
    """How a custom model is parallelized, by module names; `*` matches one part of a name.

    Sharding and replicas need none of it. A pipeline needs `blocks`, `first` and `last`; a tensor axis needs `columns`,
    `rows` and, for embeddings and heads, `vocabulary`.
    """

    blocks: Module | None = None
    """The list of blocks, each taking the residual stream first and returning it: a pipeline splits between them."""
    first: tuple[Module, ...] = ()
    """Modules of the first pipeline stage only, such as the embedding."""
    last: tuple[Module, ...] = ()
    """Modules of the last pipeline stage only, such as the final norm and the head."""
    columns: tuple[Module, ...] = ()
    """Column-parallel linear modules (split outputs): queries, keys, values, a feed-forward's first matrices."""
    rows: tuple[Module, ...] = ()
    """Row-parallel linear modules (split inputs, summed outputs): those that follow `columns`."""
    vocabulary: tuple[Module, ...] = ()
    """Embeddings and head with a split vocabulary; no worker then has all logits."""
    share: tuple[Module, ...] = ()
    """Modules with replicated parameters that see a share of tokens or heads, such as norms: gradients are summed."""
    whole: tuple[Module, ...] = ()
    """Modules that contain `columns` and need whole sequences, which are gathered for them; outside of them each worker
    has a share of each sequence (sequence parallel)."""
    divide: tuple[Module, ...] = ()
    """Integer attributes of modules that count what is split: blocks.*.attention.heads."""


def _plain(value: Any, name: str) -> Any:
    """Return a value that TOML and JSON can both hold; tuples become lists, so that it round-trips."""
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{i}") for i, item in enumerate(value)]
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    why = f"is {value!r}: expected a number, string, boolean, list or table"
    raise PydanticCustomError("at_key", "model.args.{key} {why}", {"key": name, "why": why})


def _arguments(args: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of a class by name; unset ones keep the class's defaults."""
    for name in args:
        if not name.isidentifier():
            raise PydanticCustomError("at_key", "model.args.{key} {why}", {"key": name, "why": "is not an identifier"})
    return {name: _plain(value, name) for name, value in args.items() if value is not None}


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face folder: which Headway tensors it holds, and how."""

    name: str
    """Its name in the folder."""
    headway_names: tuple[str, ...]
    form: Literal["same", "rows", "transposed", "heads", "expert", "experts-transposed", "experts-paired", "copy"] = (
        "same"
    )
    """same: one Headway tensor as it is. rows: several, concatenated by rows. transposed: the transpose of that. heads:
    several, interleaved by head. expert: one slice of a stack. experts-transposed: every slice transposed.
    experts-paired: that of two stacks, with alternating columns. copy: one of several equal copies."""
    index: int = 0
    """Index of the slice or copy, or number of heads."""
    rows: tuple[int, ...] = ()
    """rows, transposed: number of rows of each Headway tensor."""


SCORE = "score.weight"
"""The head of a reward model, here and in Hugging Face folders."""


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Shapes:
    """Return the tensor shapes of a linear module."""
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


class Model(Section):
    """The decoder to train, or a custom model class."""

    model_config = ConfigDict(populate_by_name=True)

    NAMES: ClassVar[dict[str, str]] = {}
    """Modules of a block: Headway's name to Hugging Face's."""
    OUTSIDE: ClassVar[dict[str, str]] = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    """Tensors outside of blocks, likewise."""
    UNCUT: ClassVar[str] = ""
    """Why tensor parallelism is unsupported; empty if it is supported."""
    LAYERS: ClassVar[str] = "model.layers"
    """Hugging Face's name of the list of blocks."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    """Patterns of tensor names in older folders, and their replacement."""
    FOLLOWS: ClassVar[str] = r".*\.rotary_emb\.inv_freq"
    """A pattern of tensors in folders that are derived from the config and ignored."""
    ABSENT: ClassVar[frozenset[str]] = frozenset()
    """Common keys that the family does not have."""

    class_: Annotated[str, Field(pattern=OWN_NAME)] | None = Field(default=None, alias="class")
    """A custom model class, as package.module:Class: a torch module from tokens [B, L] to logits [B, L, V]."""
    args: Annotated[dict[str, Any], AfterValidator(_arguments)] = Field(default_factory=dict)
    """Keyword arguments of that class."""
    layout: ModelLayout | None = None
    """How that class is parallelized over tensor and pipeline axes."""
    family: str = "llama"
    """The decoder family."""
    init: str | None = None
    """Initial weights: a Hugging Face folder (whose config.json then gives the shape), or RUN@STEP."""
    vocab_size: Positive | None = None
    """Rows of the embedding; by default the tokenizer's size, rounded up to a multiple of 64."""
    layers: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 4
    """Number of decoder blocks."""
    dim: Positive = 256
    """Width of the residual stream."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Positive = DERIVED
    """Number of key and value heads; by default that of query heads."""
    head_dim: Positive = DERIVED
    """Size of one head; by default dim / heads."""
    hidden: Positive = DERIVED
    """Inner width of the feed-forward; by default 8/3 dim, rounded up to a multiple of 64."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Added to the mean square inside each norm."""
    tie_embeddings: bool = True
    """Also use the input embedding as the output head."""
    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of initial weights."""
    mup_base: Positive | None = None
    """Width at which init_std and the learning rate were tuned; muP (maximal update parametrization) transfers them to
    a wider model with more heads of the same size. Needs untied embeddings."""

    reward: bool = False
    """A reward model: a scalar head (`score`) on the stream instead of one over the vocabulary; `objective.kind =
    "reward"` sets it."""

    def __new__(cls, **values: Any) -> Self:
        """Create a section of the class of its family."""
        if cls is not Model:
            return super().__new__(cls)
        from headway.recipe.families import class_of

        return cast("Self", object.__new__(class_of(values)))

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in derived fields; leave invalid values for validation."""
        if not isinstance(values, dict):
            return values
        values = _check_keys(cls, values)
        dim, heads = (values.get(key, cls.model_fields[key].default) for key in ("dim", "heads"))
        if isinstance(dim, int) and isinstance(heads, int) and dim > 0 and heads > 0:
            for key, value in cls._follow(dim, heads).items():
                if values.get(key) is None:
                    values[key] = value
        return values

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        """Return the default of fields derived from width and heads."""
        return {"kv_heads": heads, "head_dim": max(dim // heads, 1), "hidden": math.ceil(dim * 8 / 3 / 64) * 64}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.mup_base is not None and self.tie_embeddings:
            raise ValueError("mup_base needs tie_embeddings = false: head and embedding have different learning rates")
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only fields that apply to this kind of model, by their names in files."""
        values = {"class" if key == "class_" else key: value for key, value in handler(self).items()}
        given = {key: value for key, value in values.items() if _applies(key, self.class_ is not None)}
        given = {key: value for key, value in given.items() if key not in self.ABSENT}
        return given if self.reward else {key: value for key, value in given.items() if key != "reward"}

    # -- implemented by families

    @classmethod
    def from_config(cls, config: Config) -> "Model":
        """Return the model section for a config.json; raise ModelError for unsupported settings."""
        raise NotImplementedError

    def to_config(self, seq: int) -> dict[str, Any]:
        """Return a config.json that `transformers` reads as the same decoder; `seq` is the training length."""
        raise NotImplementedError

    def architecture(self) -> Architecture:
        """Return the dimensions that determine its cost."""
        raise NotImplementedError

    def block_tensors(self, layer: int) -> Shapes:
        """Return the parameter shapes of a block, in module order."""
        raise NotImplementedError

    def tensors(self) -> Shapes:
        """Return the shape of every parameter by name, in module order."""
        vocabulary = self.vocabulary
        shapes: Shapes = {"embed.weight": (vocabulary, self.dim)}
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.block_tensors(layer).items()}
        shapes["norm.weight"] = (self.dim,)
        if self.reward:
            shapes[SCORE] = (1, self.dim)
        elif not self.tie_embeddings:
            shapes["head.weight"] = (vocabulary, self.dim)
        return shapes

    def buffers(self) -> Shapes:
        """Return the shapes of persistent float32 buffers; most families have none."""
        return {}

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Yield the tensors of a Hugging Face folder, with the Headway tensors they hold."""
        for name in (*self.tensors(), *self.buffers()):
            yield HfTensor(self.hf_name(name), (name,))

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of a tensor that is stored unchanged."""
        if name == SCORE:
            return name
        if name in self.OUTSIDE:
            return self.OUTSIDE[name]
        _, layer, rest = name.split(".", 2)
        if rest in self.NAMES:
            return f"{self.LAYERS}.{layer}.{self.NAMES[rest]}"
        module, kind = rest.rsplit(".", 1)
        return f"{self.LAYERS}.{layer}.{self.NAMES[module]}.{kind}"

    def follows(self, name: str) -> bool:
        """Whether a tensor of a Hugging Face folder can be ignored."""
        return re.fullmatch(self.FOLLOWS, name) is not None

    def initial(self, name: str) -> tuple[float, float]:
        """Return the mean and standard deviation of a parameter's initial values.

        Projections into the residual stream are scaled by 1 / sqrt(2 * layers), so that it does not grow with depth.
        """
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if name.endswith("bias"):
            return 0.0, 0.0
        std = self.init_std
        if name == "head.weight" and self.mup_base is not None:
            std = 0.0  # as muP's authors advise: a random head would make widths differ
        if name.endswith((".o.weight", ".down.weight", ".down")):
            std /= math.sqrt(2 * self.layers)
        match self._side(name):
            case "hidden":
                std /= math.sqrt(self._wider)
            case "output":
                std /= self._wider
        return 0.0, std

    def rate_factor(self, name: str) -> float:
        """Return the factor of a parameter's learning rate: under muP, matrices with wide inputs learn slower."""
        return 1.0 if self._side(name) == "input" else 1 / self._wider

    @property
    def _wider(self) -> float:
        return self.dim / self.mup_base if self.mup_base is not None else 1.0

    def _side(self, name: str) -> Literal["input", "hidden", "output"]:
        """Return the muP class of a parameter: which of its dimensions grow with the width."""
        if name in ("head.weight", SCORE) or ".router" in name:
            return "output"
        vector = name.endswith(("norm.weight", "bias", "sinks"))
        return "hidden" if name.startswith("layers.") and not vector else "input"

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer, in tokens including the current one; None for full attention."""
        return None

    @property
    def longest(self) -> int | None:
        """Longest sequence in tokens, as limited by positions; None for any."""
        return None

    @property
    def vocabulary(self) -> int:
        """The vocabulary size, which is resolved before a decoder is built."""
        assert self.vocab_size is not None, "vocab_size is resolved before a decoder is built"
        return self.vocab_size


class CustomModel(Model):
    """A custom model class."""

    family: Literal["own"] = "own"
    """None of Headway's families."""


def _applies(key: str, custom: bool) -> bool:
    """Whether a key applies to a custom class, or to a decoder."""
    return key in ("class", "init") or (key in ("args", "layout")) == custom


def _check_keys(kind: type[Model], values: dict[str, Any]) -> dict[str, Any]:
    """Return a model section without unset keys; refuse keys of the other kind of model."""
    given = {"class" if key == "class_" else key: value for key, value in values.items()}
    custom = given.get("class") is not None
    for key in kind.model_fields:
        value = given.get(key)
        if key in kind.ABSENT and value is not None:
            why = str(kind.model_fields["family"].default)
            raise PydanticCustomError("at_key", "model.{key} does not apply to {why}", {"key": key, "why": why})
        if key == "class_" or value in (None, {}) or _applies(key, custom) or (custom and key == "family"):
            continue
        why = "a custom class: put it into model.args" if custom else "a decoder: set model.class for a custom one"
        raise PydanticCustomError("at_key", "model.{key} does not apply to {why}", {"key": key, "why": why})
    # Unset keys are dropped; a decoder's own fields report by themselves that they need a value.
    return {key: v for key, v in given.items() if v is not None or (_applies(key, custom) and key != "args")}
