"""The base of diffusion families: transformers over patches of images or videos that predict noise or velocity.

Sizes of images and videos come from the data: `grid` says how many patches they have. Tensor names are Headway's;
`NAMES` and `OUTSIDE` map them to those of a diffusers folder.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError, what_is_wrong
from headway.recipe.architecture import Architecture, DiffusionShape
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.section import DERIVED, Positive

Conditioning = Literal["class", "text"]
"""What a sample is conditioned on."""
BYTES = "bytes"
"""The text encoder of Headway's own, which needs no folder."""
BYTE_TEXT_DIM = 64
"""Its width by default."""
FEATURES = 256
"""Sinusoidal features of a time."""
AXES = ("frames", "height", "width")


class DiffusionModel(Model):
    """A transformer over patches that a diffusion or flow-matching objective trains."""

    ABSENT: ClassVar[frozenset[str]] = frozenset(
        ("vocab_size", "kv_heads", "tie_embeddings", "init_std", "mup_base", "reward")
    )
    FOLLOWS: ClassVar[str] = r"(?!)"
    BLOCKS: ClassVar[str] = "blocks"
    """Diffusers' name of the list of blocks."""
    CLASS: ClassVar[str]
    """The class in diffusers."""

    tie_embeddings: Literal[False] = False
    """There is no embedding of tokens."""
    in_channels: Positive = 4
    """Channels of an image, a video or their latents, which the model takes and predicts."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Added to the variance inside norms."""
    conditioning: Conditioning = "class"
    """What a sample is conditioned on: its class, or a text."""
    num_classes: Positive | None = None
    """Number of classes; one more row of the embedding stands for no class."""
    text_encoder: str | None = DERIVED
    """A Hugging Face folder of a T5, UMT5 or CLIP text encoder, which is frozen; or "bytes", the default with text: a
    small one of Headway's, whose weights follow from a fixed seed."""
    text_tokens: Positive | None = DERIVED
    """Tokens of a prompt, padding included; by default 64."""
    text_dim: Positive | None = DERIVED
    """Width of the text encoder's output; by default 64, that of "bytes"."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, values: Any) -> Any:
        """Derive the settings of text."""
        if not isinstance(values, dict) or not cls._takes_text(values):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {"text_encoder": BYTES, **cls._text_defaults(), **given}

    @classmethod
    def _takes_text(cls, values: Mapping[str, Any]) -> bool:
        return bool(values.get("conditioning", cls.model_fields["conditioning"].default) == "text")

    @classmethod
    def _text_defaults(cls) -> dict[str, Any]:
        return {"text_tokens": 64, "text_dim": BYTE_TEXT_DIM}

    @classmethod
    def _follow(cls, dim: int, heads: int) -> dict[str, int]:
        return super()._follow(dim, heads) | {"hidden": 4 * dim}

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.heads * self.head_dim != self.dim:
            raise ValueError(f"heads x head_dim ({self.heads} x {self.head_dim}) must equal dim ({self.dim})")
        if self.conditioning == "class" and self.num_classes is None and self.init is None:
            raise ValueError('conditioning = "class" needs num_classes')
        if self.conditioning == "text" and self.num_classes is not None:
            raise ValueError('num_classes has no effect with conditioning = "text"')
        if self.conditioning == "class" and (self.text_encoder or self.text_tokens or self.text_dim):
            raise ValueError('text_encoder, text_tokens and text_dim have no effect with conditioning = "class"')
        return self

    # -- sizes

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """Frames, rows and columns of a patch."""
        raise NotImplementedError

    @property
    def input_channels(self) -> int:
        """Channels of a patch, with those of image latents beside it."""
        return self.in_channels

    @property
    def beside_channels(self) -> int:
        """Channels that an image-to-video model takes beside the sample's: an image and its mask."""
        return self.input_channels - self.in_channels

    @property
    def output_channels(self) -> int:
        """Channels that the head computes for a patch; the first `in_channels` are the prediction."""
        return self.in_channels

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of patches along each axis; raise ModelError for sizes that patches do not divide."""
        sizes, patch = (frames, height, width), self.patch_sizes
        for axis, size, step in zip(AXES, sizes, patch, strict=True):
            if size % step or size < 1:
                near = [str(n) for n in (size // step * step, (size // step + 1) * step) if n > 0]
                raise ModelError(
                    f"{_by(sizes)} ({' x '.join(AXES)}) is not divisible into patches of {_by(patch)}: {axis} {size}",
                    hint=f"nearest that work: {' or '.join(near)}",
                )
        return frames // patch[0], height // patch[1], width // patch[2]

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Return the number of patches, which is the length of the sequence."""
        return math.prod(self.grid(frames, height, width))

    @property
    def usual_tokens(self) -> int:
        """Patches of the samples that such models are usually trained on, where no data says it."""
        raise NotImplementedError

    # -- cost

    def costs(self, **more: Any) -> Architecture:
        """Return the dimensions that determine the cost of any diffusion transformer, and more of a family."""
        first, _ = self.outer_tensors()
        patch = math.prod(self.patch_sizes)
        shape = DiffusionShape(
            inputs=patch * self.input_channels,
            outputs=patch * self.output_channels,
            time_features=first["time.up.weight"][1],
            classes=0 if self.num_classes is None else self.num_classes + 1,
            text_tokens=self.text_tokens or 0,
            text_dim=self.text_dim or 0,
            **{key: value for key, value in more.items() if key in DiffusionShape.__dataclass_fields__},
        )
        rest = {key: value for key, value in more.items() if key not in DiffusionShape.__dataclass_fields__}
        return Architecture(
            layers=self.layers, dim=self.dim, heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim,
            hidden=self.hidden, vocab=0, gated=False, layer_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True,
            diffusion=shape, **rest,
        )  # fmt: skip

    # -- tensors

    def outer_tensors(self) -> tuple[Shapes, Shapes]:
        """Return the parameter shapes before and after the blocks, in module order."""
        raise NotImplementedError

    def tensors(self) -> Shapes:
        """Return the shape of every parameter by name, in module order."""
        first, last = self.outer_tensors()
        shapes = dict(first)
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.block_tensors(layer).items()}
        return shapes | last

    def hf_name(self, name: str) -> str:
        """Return diffusers' name of a tensor."""
        parts = name.split(".")
        inside = parts[0] == "layers"
        names, prefix = (self.NAMES, f"{self.BLOCKS}.{parts[1]}.") if inside else (self.OUTSIDE, "")
        rest = ".".join(parts[2:]) if inside else name
        if rest in names:
            return f"{prefix}{names[rest]}"
        module, _, kind = rest.rpartition(".")
        return f"{prefix}{names[module]}.{kind}"

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Yield the tensors of a diffusers folder, which are Headway's with other names."""
        for name in self.tensors():
            yield HfTensor(self.hf_name(name), (name,))

    def initial(self, name: str) -> tuple[float, float]:
        """Return the mean and standard deviation of a parameter's initial values.

        Matrices as Glorot and Bengio, embeddings 0.02. What ends a branch of a block starts at zero (adaLN-zero), as
        does the head: the first model predicts zero.
        """
        kind = name.rpartition(".")[2]
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if kind == "bias" or self.starts_at_zero(name):
            return 0.0, 0.0
        if name.startswith(("time.", "classes.", "text.")) or kind in ("modulation", "positions"):
            return 0.0, self.small_std(name)
        shape = self._shape(name)
        return 0.0, math.sqrt(2 / (shape[0] + math.prod(shape[1:])))

    def starts_at_zero(self, name: str) -> bool:
        """Whether a weight is zero at first."""
        return name == "head.out.weight"

    def small_std(self, name: str) -> float:
        """Return the standard deviation of embeddings and tables."""
        return 0.02

    def _shape(self, name: str) -> tuple[int, ...]:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        return self.block_tensors(int(layer))[rest] if name.startswith("layers.") else self.tensors_outside[name]

    @property
    def tensors_outside(self) -> Shapes:
        """The shapes of parameters outside of blocks."""
        first, last = self.outer_tensors()
        return first | last

    def rate_factor(self, name: str) -> float:
        """All parameters have the same learning rate."""
        return 1.0


def mlp(name: str, inputs: int, hidden: int, outputs: int) -> Shapes:
    """Return the shapes of two linear maps with biases: `up` and `down`."""
    return linear(f"{name}.up", inputs, hidden, True) | linear(f"{name}.down", hidden, outputs, True)


def attention(name: str, dim: int) -> Shapes:
    """Return the shapes of attention's four maps, with biases."""
    return {key: shape for part in "qkvo" for key, shape in linear(f"{name}.{part}", dim, dim, True).items()}


def checked(family: type[Model], settings: dict[str, Any]) -> Model:
    """Return a model section for the settings of a diffusers config.json; raise ModelError if they are invalid."""
    from pydantic import ValidationError

    try:
        return family(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "shape"
        raise ModelError(f"config.json is invalid: {key}: {what_is_wrong(first)}") from None


def require(config: Config, **fixed: Any) -> None:
    """Raise ModelError for keys with another value than the one that is supported; a missing key has it."""
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ModelError(f"config.json has {key} {config[key]!r}; this family supports only {value!r}")


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
