"""Wan 2.1: a video transformer with 3D patches, 3D rotary positions and cross-attention to a text, and to an image."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.diffusion import AXES, DiffusionModel, attention, checked, mlp, require
from headway.recipe.model import Config, Model, Shapes, linear
from headway.recipe.section import DERIVED, NotNegative, Positive

CLIP_TOKENS = 257
"""Embeddings of an image, of the encoder that the published models use."""
Sizes = tuple[Positive, Positive, Positive]


class Wan(DiffusionModel):
    """A diffusion transformer for videos."""

    ABSENT: ClassVar[frozenset[str]] = DiffusionModel.ABSENT | {"num_classes"}
    CLASS: ClassVar[str] = "WanTransformer3DModel"
    NAMES: ClassVar[dict[str, str]] = {
        "modulation": "scale_shift_table",
        **{
            f"{here}.{part}": f"{there}.{name}"
            for here, there in (("attention", "attn1"), ("cross", "attn2"))
            for part, name in (
                ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"), ("q_norm", "norm_q"),
                ("k_norm", "norm_k"),
            )
        },
        "cross.image_k": "attn2.add_k_proj",
        "cross.image_v": "attn2.add_v_proj",
        "cross.image_k_norm": "attn2.norm_added_k",
        "cross_norm": "norm2",
        "mlp.up": "ffn.net.0.proj",
        "mlp.down": "ffn.net.2",
    }  # fmt: skip
    OUTSIDE: ClassVar[dict[str, str]] = {
        "patch": "patch_embedding",
        "time.up": "condition_embedder.time_embedder.linear_1",
        "time.down": "condition_embedder.time_embedder.linear_2",
        "time.out": "condition_embedder.time_proj",
        "text.up": "condition_embedder.text_embedder.linear_1",
        "text.down": "condition_embedder.text_embedder.linear_2",
        "image.norm": "condition_embedder.image_embedder.norm1",
        "image.up": "condition_embedder.image_embedder.ff.net.0.proj",
        "image.down": "condition_embedder.image_embedder.ff.net.2",
        "image.out_norm": "condition_embedder.image_embedder.norm2",
        "image.positions": "condition_embedder.image_embedder.pos_embed",
        "head.modulation": "scale_shift_table",
        "head.out": "proj_out",
    }

    family: Literal["wan"] = "wan"
    in_channels: Positive = 16
    """Channels of a video or its latents, which the model takes and predicts."""
    conditioning: Literal["text"] = "text"
    """A text."""
    text_tokens: Positive = DERIVED
    """Tokens of a prompt, padding included; by default 512."""
    patch: Sizes = (1, 2, 2)
    """Frames, rows and columns of a patch: three numbers."""
    time_features: Annotated[int, Field(ge=2, multiple_of=2, strict=True)] = 256
    """Sinusoidal features of a time."""
    cross_norm: bool = True
    """A norm before cross-attention."""
    positions: Positive = 1024
    """Most patches along an axis."""
    image_channels: NotNegative = 0
    """Channels of image latents and their mask, which image-to-video models take beside the video's."""
    image_dim: Positive | None = None
    """Width of image embeddings, which image-to-video models attend to beside the text."""
    image_positions: Positive | None = None
    """Image embeddings with learned positions: those of a first and a last frame."""

    @classmethod
    def _text_defaults(cls) -> dict[str, Any]:
        return {"text_tokens": 512, "text_dim": 64}

    @model_validator(mode="after")
    def _rotates(self) -> Self:
        if self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(f"head_dim is {self.head_dim}: positions along three axes need an even number, 6 or more")
        if self.image_positions is not None and self.image_dim is None:
            raise ValueError("image_positions has no effect without image_dim")
        return self

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """Those of the recipe."""
        return self.patch

    @property
    def input_channels(self) -> int:
        """With those of image latents."""
        return self.in_channels + self.image_channels

    @property
    def usual_tokens(self) -> int:
        """Latents of 81 frames of 480 x 832 pixels."""
        return (21 // self.patch[0]) * (60 // self.patch[1]) * (104 // self.patch[2])

    @property
    def rotary_dims(self) -> tuple[int, int, int]:
        """Dimensions of a head that are rotated by frame, row and column."""
        space = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * space, space, space

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of patches along each axis."""
        grid = super().grid(frames, height, width)
        for axis, count in zip(AXES, grid, strict=True):
            if count > self.positions:
                raise ModelError(f"{axis} has {count} patches; this model has positions for {self.positions}")
        return grid

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of WanTransformer3DModel."""
        require(config, qk_norm="rms_norm_across_heads")
        heads, head_dim = config.get("num_attention_heads", 40), config.get("attention_head_dim", 128)
        inputs = config.get("in_channels", 16)
        outputs = config.get("out_channels") or inputs
        image_dim, added = config.get("image_dim"), config.get("added_kv_proj_dim")
        if outputs > inputs:
            raise ModelError(f"config.json has more out_channels ({outputs}) than in_channels ({inputs})")
        if added not in (None, heads * head_dim) or (added is None) != (image_dim is None):
            raise ModelError(
                f"config.json has image_dim {image_dim} and added_kv_proj_dim {added}: expected both or neither, and "
                f"the latter to be {heads * head_dim}"
            )
        positions = config.get("pos_embed_seq_len")
        return checked(
            cls,
            {
                "layers": config.get("num_layers", 40),
                "dim": heads * head_dim,
                "heads": heads,
                "hidden": config.get("ffn_dim", 13824),
                "in_channels": outputs,
                "patch": tuple(config.get("patch_size", (1, 2, 2))),
                "norm_eps": config.get("eps", 1e-6),
                "text_dim": config.get("text_dim", 4096),
                "time_features": config.get("freq_dim", 256),
                "cross_norm": config.get("cross_attn_norm", True),
                "positions": config.get("rope_max_seq_len", 1024),
                "image_channels": inputs - outputs,
                "image_dim": image_dim,
                "image_positions": positions,
            },
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Return a config.json of WanTransformer3DModel."""
        return {
            "_class_name": self.CLASS,
            "added_kv_proj_dim": None if self.image_dim is None else self.dim,
            "attention_head_dim": self.head_dim,
            "cross_attn_norm": self.cross_norm,
            "eps": self.norm_eps,
            "ffn_dim": self.hidden,
            "freq_dim": self.time_features,
            "image_dim": self.image_dim,
            "in_channels": self.input_channels,
            "num_attention_heads": self.heads,
            "num_layers": self.layers,
            "out_channels": self.in_channels,
            "patch_size": list(self.patch),
            "pos_embed_seq_len": self.image_positions,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": self.positions,
            "text_dim": self.text_dim,
        }

    def architecture(self) -> Architecture:
        """Return the dimensions that determine its cost."""
        images = {} if self.image_dim is None else {
            "image_tokens": self.image_positions or CLIP_TOKENS,
            "image_dim": self.image_dim,
            "image_positions": self.image_positions or 0,
        }  # fmt: skip
        return self.costs(
            rotary=True, qk_norm=True, qk_norm_whole=True, cross_norm=self.cross_norm, modulates_layers=False, **images
        )

    def block_tensors(self, layer: int) -> Shapes:
        """Modulation, attention, cross-attention, feed-forward."""
        norms: Shapes = {"q_norm.weight": (self.dim,), "k_norm.weight": (self.dim,)}
        shapes: Shapes = {"modulation": (1, 6, self.dim), **attention("attention", self.dim)}
        shapes |= {f"attention.{name}": shape for name, shape in norms.items()}
        if self.cross_norm:
            shapes |= {"cross_norm.weight": (self.dim,), "cross_norm.bias": (self.dim,)}
        shapes |= attention("cross", self.dim) | {f"cross.{name}": shape for name, shape in norms.items()}
        if self.image_dim is not None:
            shapes |= linear("cross.image_k", self.dim, self.dim, True)
            shapes |= linear("cross.image_v", self.dim, self.dim, True)
            shapes["cross.image_k_norm.weight"] = (self.dim,)
        return shapes | mlp("mlp", self.dim, self.hidden, self.dim)

    def outer_tensors(self) -> tuple[Shapes, Shapes]:
        """Patches, time, text and image; then the head."""
        assert self.text_dim is not None, "this family always takes a text"
        first: Shapes = {
            "patch.weight": (self.dim, self.input_channels, *self.patch),
            "patch.bias": (self.dim,),
            **mlp("time", self.time_features, self.dim, self.dim),
            **linear("time.out", self.dim, 6 * self.dim, True),
            **mlp("text", self.text_dim, self.dim, self.dim),
        }
        if self.image_dim is not None:
            if self.image_positions is not None:
                first["image.positions"] = (1, self.image_positions, self.image_dim)
            first |= mlp("image", self.image_dim, self.image_dim, self.dim)
            first |= _norm("image.norm", self.image_dim) | _norm("image.out_norm", self.dim)
        outputs = self.in_channels * self.patch[0] * self.patch[1] * self.patch[2]
        return first, {"head.modulation": (1, 2, self.dim)} | linear("head.out", self.dim, outputs, True)

    def small_std(self, name: str) -> float:
        """Return the standard deviation of embeddings and tables; modulation is as in the published code."""
        return self.dim**-0.5 if name.endswith("modulation") else super().small_std(name)


def _norm(name: str, dim: int) -> Shapes:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}
