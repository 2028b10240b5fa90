"""DiT: 2D patches with adaLN-zero, conditioned on a class, or on a text by cross-attention."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from headway.errors import ModelError
from headway.recipe.architecture import Architecture
from headway.recipe.families.diffusion import FEATURES, DiffusionModel, attention, checked, mlp, require
from headway.recipe.model import Config, HfTensor, Model, Shapes, linear
from headway.recipe.section import Positive

SHARED = "norm1.emb"
"""What diffusers keeps in every block, and this family once: embeddings of time and class."""


class DiT(DiffusionModel):
    """A diffusion transformer for images."""

    CLASS: ClassVar[str] = "DiTTransformer2DModel"
    BLOCKS: ClassVar[str] = "transformer_blocks"
    NAMES: ClassVar[dict[str, str]] = {
        "modulation": "norm1.linear",
        **{f"attention.{part}": f"attn1.to_{part}" for part in "qkv"},
        "attention.o": "attn1.to_out.0",
        "cross_norm": "norm2",
        **{f"cross.{part}": f"attn2.to_{part}" for part in "qkv"},
        "cross.o": "attn2.to_out.0",
        "mlp.up": "ff.net.0.proj",
        "mlp.down": "ff.net.2",
    }
    OUTSIDE: ClassVar[dict[str, str]] = {
        "patch": "pos_embed.proj",
        "time.up": f"{SHARED}.timestep_embedder.linear_1",
        "time.down": f"{SHARED}.timestep_embedder.linear_2",
        "classes": f"{SHARED}.class_embedder.embedding_table",
        "text.up": "caption_projection.linear_1",
        "text.down": "caption_projection.linear_2",
        "head.modulation": "proj_out_1",
        "head.out": "proj_out_2",
    }

    family: Literal["dit"] = "dit"
    patch: Positive = 2
    """Rows and columns of a patch."""
    base_size: Positive | None = None
    """Rows and columns of the images whose positions are 0, 1, 2, ...: others are interpolated; by default none are."""
    learned_variance: bool = False
    """Compute as many channels again, for the variance; the prediction is the first half."""

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """One frame, and a square."""
        return 1, self.patch, self.patch

    @property
    def usual_tokens(self) -> int:
        """Images of the base size, or of 32 x 32 latents (256 x 256 pixels)."""
        return max(1, (self.base_size or 32) // self.patch) ** 2

    @property
    def output_channels(self) -> int:
        """Twice the prediction's with a learned variance."""
        return self.in_channels * (2 if self.learned_variance else 1)

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of patches along each axis."""
        if frames != 1:
            raise ModelError(
                f"a sample has {frames} frames; dit takes images", hint='model.family = "wan" takes videos'
            )
        return super().grid(frames, height, width)

    @classmethod
    def from_config(cls, config: Config) -> Model:
        """Read a config.json of DiTTransformer2DModel."""
        require(
            config, norm_type="ada_norm_zero", norm_elementwise_affine=False, attention_bias=True,
            activation_fn="gelu-approximate", upcast_attention=False,
        )  # fmt: skip
        heads, head_dim = config.get("num_attention_heads", 16), config.get("attention_head_dim", 72)
        channels = config.get("in_channels", 4)
        outputs = config.get("out_channels") or channels
        if outputs not in (channels, 2 * channels):
            raise ModelError(f"config.json has out_channels {outputs}, which is neither {channels} nor {2 * channels}")
        return checked(
            cls,
            {
                "layers": config.get("num_layers", 28),
                "dim": heads * head_dim,
                "heads": heads,
                "in_channels": channels,
                "patch": config.get("patch_size", 2),
                "base_size": config.get("sample_size", 32),
                "num_classes": config.get("num_embeds_ada_norm", 1000),
                "norm_eps": config.get("norm_eps", 1e-5),
                "learned_variance": outputs != channels,
            },
        )

    def to_config(self, seq: int) -> dict[str, Any]:
        """Return a config.json of DiTTransformer2DModel, which has classes only."""
        if self.conditioning == "text":
            raise ModelError("a text-conditional dit cannot be written as a diffusers folder: its DiT has classes only")
        if self.hidden != 4 * self.dim:
            raise ModelError(
                f"diffusers' DiT has a feed-forward of 4 x dim ({4 * self.dim}), and this one {self.hidden}"
            )
        return {
            "_class_name": self.CLASS,
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
            "attention_head_dim": self.head_dim,
            "dropout": 0.0,
            "in_channels": self.in_channels,
            "norm_elementwise_affine": False,
            "norm_eps": self.norm_eps,
            "norm_num_groups": 32,
            "norm_type": "ada_norm_zero",
            "num_attention_heads": self.heads,
            "num_embeds_ada_norm": self.num_classes,
            "num_layers": self.layers,
            "out_channels": self.output_channels,
            "patch_size": self.patch,
            "sample_size": self.base_size or 32,
            "upcast_attention": False,
        }

    def architecture(self) -> Architecture:
        """Return the dimensions that determine its cost."""
        return self.costs(rotary=False, cross_norm=self.conditioning == "text")

    def block_tensors(self, layer: int) -> Shapes:
        """Modulation, attention, cross-attention to a text, feed-forward."""
        shapes = linear("modulation", self.dim, 6 * self.dim, True) | attention("attention", self.dim)
        if self.conditioning == "text":
            shapes |= {"cross_norm.weight": (self.dim,), "cross_norm.bias": (self.dim,)} | attention("cross", self.dim)
        return shapes | mlp("mlp", self.dim, self.hidden, self.dim)

    def outer_tensors(self) -> tuple[Shapes, Shapes]:
        """Patches, time, and classes or text; then the head."""
        first: Shapes = {
            "patch.weight": (self.dim, self.in_channels, self.patch, self.patch),
            "patch.bias": (self.dim,),
            **mlp("time", FEATURES, self.dim, self.dim),
        }
        if self.num_classes is not None:
            first["classes.weight"] = (self.num_classes + 1, self.dim)
        if self.text_dim is not None:
            first |= mlp("text", self.text_dim, self.dim, self.dim)
        outputs = self.output_channels * self.patch**2
        return first, linear("head.modulation", self.dim, 2 * self.dim, True) | linear(
            "head.out", self.dim, outputs, True
        )

    def hf_tensors(self) -> Iterator[HfTensor]:
        """Yield the tensors of a diffusers folder, in which every block has the embeddings of time and class."""
        for name in self.tensors():
            stored = self.hf_name(name)
            if not stored.startswith(SHARED):
                yield HfTensor(stored, (name,))
                continue
            for layer in range(self.layers):
                yield HfTensor(f"{self.BLOCKS}.{layer}.{stored}", (name,), "copy", index=layer)

    def starts_at_zero(self, name: str) -> bool:
        """adaLN-zero: gates, shifts and scales, and what cross-attention adds."""
        return super().starts_at_zero(name) or name.endswith(("modulation.weight", "cross.o.weight"))
