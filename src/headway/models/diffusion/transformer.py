"""The base of diffusion transformers: patches, a condition, blocks on a residual stream, and a head.

Plain modules for one device, independent of parallelism. A time is 0 for data and 1 for noise.
"""

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.diffusion.conditioning import Conditioning, TextStates
from headway.models.diffusion.layers import PatchEmbedding, samples_of
from headway.recipe.families.diffusion import DiffusionModel


class DiffusionTransformer(nn.Module):
    """A diffusion transformer, configured by a recipe's model section.

    Its weights are uninitialized until `init_weights` or a load fills them.
    """

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self.model = model
        self.patch = PatchEmbedding(model.dim, model.input_channels, model.patch_sizes, self.patch_dims)
        self.make_first()
        self.layers = nn.ModuleList(self.make_block(layer) for layer in range(model.layers))
        self.head: nn.Module = self.make_head()

    # -- overridden by families

    patch_dims: int
    """Dimensions of a patch in its weight: 2 for images, 3 for videos."""

    def make_first(self) -> None:
        """Make the embeddings of time and condition."""
        raise NotImplementedError

    def make_block(self, layer: int) -> nn.Module:
        """Return a block."""
        raise NotImplementedError

    def make_head(self) -> nn.Module:
        """Return the head, from the stream and the time's embedding to patches."""
        raise NotImplementedError

    def stream(self, x_BLD: Tensor, grid: tuple[int, int, int], t_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Return predicted patches [B, L, P] from embedded ones."""
        raise NotImplementedError

    # -- forward

    def forward(self, x_BCTYX: Tensor, t_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the prediction for a noisy sample, of its shape and precision: noise, velocity or data, as trained.

        An image has one frame. Times are floats from 0 (data) to 1 (noise).
        """
        return self._run(x_BCTYX, t_B, conditioning, self.model.in_channels)

    def outputs(self, x_BCTYX: Tensor, t_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Return all that the head computes, [B, `output_channels`, T, Y, X]: with a learned variance, if any."""
        return self._run(x_BCTYX, t_B, conditioning, self.model.output_channels)

    def _run(self, x_BCTYX: Tensor, t_B: Tensor, conditioning: Conditioning, channels: int) -> Tensor:
        model = self.model
        grid = model.grid(*x_BCTYX.shape[2:])
        _check(model, conditioning)
        inputs = x_BCTYX
        if conditioning.latents_BCTYX is not None:
            inputs = torch.cat((x_BCTYX, conditioning.latents_BCTYX.to(x_BCTYX.dtype)), dim=1)
        if inputs.shape[1] != model.input_channels:
            raise ModelError(
                f"a sample has {inputs.shape[1]} channels; this {model.family} takes {model.input_channels}",
                hint="set model.in_channels to the channels of the data",
            )
        patches_BLP = self.stream(self.patch(inputs), grid, t_B, conditioning)
        return samples_of(patches_BLP, grid, model.patch_sizes, channels).to(x_BCTYX.dtype)


def _check(model: DiffusionModel, conditioning: Conditioning) -> None:
    """Raise ModelError for a condition that the model lacks or does not take."""
    if (model.conditioning == "class") != (conditioning.labels_B is not None):
        raise ModelError(f"this {model.family} is conditioned on a {model.conditioning}, which the samples do not have")
    if conditioning.text is None:
        return
    tokens, width = conditioning.text.states_BSE.shape[1:]
    if width != model.text_dim:
        raise ModelError(
            f"the text has states of width {width}; this {model.family} takes {model.text_dim}",
            hint="model.text_dim is the width of the text encoder",
        )
    if model.text_tokens is not None and tokens > model.text_tokens:
        raise ModelError(f"the text has {tokens} tokens; this {model.family} takes {model.text_tokens}")


def text_of(conditioning: Conditioning) -> TextStates:
    """Return the text of a conditioning that has one."""
    assert conditioning.text is not None, "checked before"
    return conditioning.text
