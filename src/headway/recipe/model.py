"""The model section of a recipe: what all families of decoders have in common, and a class of the user's own.

A family (`recipe/families/`) adds the numbers that are its own and says, without torch, what its tensors are called
and how large they are, how they lie in a Hugging Face folder, what its config.json says, how its weights are drawn and
what it costs. Its module is the file of the same name in `models/`.
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
from headway.recipe.section import DERIVED, Positive, Section

__all__ = ["Config", "CustomModel", "HfTensor", "Model", "ModelLayout", "Shapes", "linear"]

Config = Mapping[str, Any]
"""A config.json."""
Shapes = dict[str, tuple[int, ...]]
"""Tensors by name, with their shapes."""
Module = Annotated[str, Field(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*(\.[A-Za-z0-9_*]+)*$")]
"""A module's dotted name inside a model; `*` stands for any one part: blocks.*.attention.out."""


class ModelLayout(Section):
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


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face folder: which of ours it holds, and how."""

    name: str
    """Theirs."""
    headway_names: tuple[str, ...]
    form: Literal["same", "rows", "transposed", "heads", "expert", "experts-transposed", "experts-paired"] = "same"
    """same: one of ours as it is. rows: ours one below the other. transposed: that, turned round. heads: of every head
    its rows of each of ours in turn. expert: one slice of ours. experts-transposed: every slice turned round.
    experts-paired: that of two of ours, whose columns alternate."""
    index: int = 0
    """Which slice, or how many heads."""
    rows: tuple[int, ...] = ()
    """rows, transposed: how many rows each of ours has."""


def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Shapes:
    """The tensors of a linear module."""
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


class Model(Section):
    """The decoder to train, in plain numbers; or a class of your own."""

    model_config = ConfigDict(populate_by_name=True)

    NAMES: ClassVar[dict[str, str]] = {}
    """Modules of a block: ours to those of a Hugging Face folder."""
    OUTSIDE: ClassVar[dict[str, str]] = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    """Tensors outside of blocks, likewise."""
    UNCUT: ClassVar[str] = ""
    """Why no tensor axis can cut it; nothing where one can."""
    LAYERS: ClassVar[str] = "model.layers"
    """Their list of blocks."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    """What older folders call their tensors, as patterns, and what they are called now."""
    FOLLOWS: ClassVar[str] = r".*\.rotary_emb\.inv_freq"
    """A pattern of tensors that folders may hold though they follow from the config."""

    class_: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = Field(default=None, alias="class")
    """A class of your own, as package.module:Class: a plain module that makes logits [B, L, V] of tokens [B, L]."""
    args: Annotated[dict[str, Any], AfterValidator(_arguments)] = Field(default_factory=dict)
    """What that class is called with, by name."""
    layout: ModelLayout | None = None
    """How that class is cut, for tensor and pipeline axes."""
    family: str = "llama"
    """Which family of decoders it is of."""
    init: str | None = None
    """Start from these weights: a Hugging Face folder (its config.json then gives the shape), or RUN@STEP."""
    vocab_size: Positive | None = None
    """Rows of the embedding; by default the tokenizer's size rounded up to a multiple of 64."""
    layers: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 4
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
    """Inner width of the feed-forward; by default 8/3 of dim rounded up to a multiple of 64."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Added to the mean square inside each norm."""
    tie_embeddings: bool = True
    """Use the input embedding as the output head too."""
    init_std: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Standard deviation of freshly drawn weights."""
    mup_base: Positive | None = None
    """Width at which init_std and the learning rate were tuned: those of a wider model follow by muP (maximal update
    parametrization), with heads of the same size and more of them. Asks for a head of its own."""

    def __new__(cls, **values: Any) -> Self:
        """A section of the family that `family` names."""
        if cls is not Model:
            return super().__new__(cls)
        from headway.recipe.families import class_of

        return cast("Self", object.__new__(class_of(values)))

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in what follows from the other numbers; leave mistakes for the fields' own checks."""
        if not isinstance(values, dict):
            return values
        values = _of_one_kind(cls, values)
        dim, heads = (values.get(key, cls.model_fields[key].default) for key in ("dim", "heads"))
        if isinstance(dim, int) and isinstance(heads, int) and dim > 0 and heads > 0:
            for key, value in cls._follow(dim, heads).items():
                if values.get(key) is None:
                    values[key] = value
        return values

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        """Numbers that follow from width and heads where nobody says otherwise."""
        return {"kv_heads": heads, "head_dim": max(dim // heads, 1), "hidden": _round_up(dim * 8 / 3, 64)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.mup_base is not None and self.tie_embeddings:
            raise ValueError("mup_base asks for tie_embeddings = false: the head's rate is not the embedding's")
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what says something of this kind of model, under the names that a file has."""
        said = {"class" if key == "class_" else key: value for key, value in handler(self).items()}
        return {key: value for key, value in said.items() if _belongs(key, self.class_ is not None)}

    # -- what a family says of itself

    @classmethod
    def from_config(cls, config: Config) -> "Model":
        """The same decoder as a config.json describes; ModelError names what it cannot do."""
        raise NotImplementedError

    def to_config(self, seq: int) -> dict[str, Any]:
        """A config.json that `transformers` reads as the same decoder; `seq` is the length it was trained at."""
        raise NotImplementedError

    def architecture(self) -> Architecture:
        """What it comes to in parameters and operations."""
        raise NotImplementedError

    def block_tensors(self, layer: int) -> Shapes:
        """Parameters of one block, in the module's order."""
        raise NotImplementedError

    def tensors(self) -> Shapes:
        """Every parameter by name, in the module's order, with its shape."""
        vocabulary = self.vocabulary
        shapes: Shapes = {"embed.weight": (vocabulary, self.dim)}
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.block_tensors(layer).items()}
        shapes["norm.weight"] = (self.dim,)
        if not self.tie_embeddings:
            shapes["head.weight"] = (vocabulary, self.dim)
        return shapes

    def buffers(self) -> Shapes:
        """What is kept beside the parameters, as float32: nothing, for most."""
        return {}

    def hf_tensors(self) -> Iterator[HfTensor]:
        """The tensors of a Hugging Face folder, in which ours are found again."""
        for name in (*self.tensors(), *self.buffers()):
            yield HfTensor(self.hf_name(name), (name,))

    def hf_name(self, name: str) -> str:
        """What a Hugging Face folder calls one of ours that it has as it is."""
        if name in self.OUTSIDE:
            return self.OUTSIDE[name]
        _, layer, rest = name.split(".", 2)
        if rest in self.NAMES:
            return f"{self.LAYERS}.{layer}.{self.NAMES[rest]}"
        module, kind = rest.rsplit(".", 1)
        return f"{self.LAYERS}.{layer}.{self.NAMES[module]}.{kind}"

    def follows(self, name: str) -> bool:
        """Whether a tensor of a Hugging Face folder says nothing of this decoder."""
        return re.fullmatch(self.FOLLOWS, name) is not None

    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation that a parameter's fresh values are drawn with.

        What is added to the residual stream is drawn smaller by sqrt(2 * layers), so that it does not grow with depth.
        """
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if name.endswith("bias"):
            return 0.0, 0.0
        std = self.init_std
        if name == "head.weight" and self.mup_base is not None:
            std = 0.0  # as muP's authors advise: its random part would shrink with the width and tell models apart
        if name.endswith((".o.weight", ".down.weight", ".down")):
            std /= math.sqrt(2 * self.layers)
        match self._side(name):
            case "hidden":
                std /= math.sqrt(self._wider)
            case "output":
                std /= self._wider
        return 0.0, std

    def rate_factor(self, name: str) -> float:
        """What a parameter's learning rate is multiplied by: by muP matrices whose inputs are wide learn slower."""
        return 1.0 if self._side(name) == "input" else 1 / self._wider

    @property
    def _wider(self) -> float:
        return self.dim / self.mup_base if self.mup_base is not None else 1.0

    def _side(self, name: str) -> Literal["input", "hidden", "output"]:
        """Which of a parameter's sides grow with the width: outputs only, both, or inputs only."""
        if name == "head.weight" or ".router" in name:
            return "output"
        vector = name.endswith(("norm.weight", "bias", "sinks"))
        return "hidden" if name.startswith("layers.") and not vector else "input"

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer looks back on, itself included; None for all."""
        return None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that it has positions for; None for any."""
        return None

    @property
    def vocabulary(self) -> int:
        """The vocabulary's size, which is settled before a decoder is built or counted."""
        assert self.vocab_size is not None, "the vocabulary's size is settled before a decoder is built or counted"
        return self.vocab_size


class CustomModel(Model):
    """A class of your own."""

    family: Literal["own"] = "own"
    """Which family it is of: none of Headway's."""


def _round_up(value: float, multiple: int) -> int:
    return int(-(-value // multiple) * multiple)


def _belongs(key: str, to_a_class: bool) -> bool:
    """Whether a key says something of a class of the user's own, or of a decoder."""
    return key in ("class", "init") or (key in ("args", "layout")) == to_a_class


def _of_one_kind(kind: type[Model], values: dict[str, Any]) -> dict[str, Any]:
    """A model section without keys that are set to nothing; those of the other kind of model are refused."""
    given = {"class" if key == "class_" else key: value for key, value in values.items()}
    own = given.get("class") is not None
    for key in kind.model_fields:
        value = given.get(key)
        if key == "class_" or value in (None, {}) or _belongs(key, own) or (own and key == "family"):
            continue
        why = "a class of your own: put it into model.args" if own else "a decoder: model.class names your own"
        raise PydanticCustomError("at_key", "model.{key} does not apply to {why}", {"key": key, "why": why})
    # What was taken back leaves nothing behind; a decoder's own fields say themselves that they need a value.
    return {key: v for key, v in given.items() if v is not None or (_belongs(key, own) and key != "args")}
