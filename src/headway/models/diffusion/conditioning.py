"""What a sample is conditioned on, and its null value, which stands for no condition in classifier-free guidance.

B  samples    S  tokens of a text    E  width of a text encoder    I  image embeddings
C  channels   T, Y, X  frames, rows, columns
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.recipe.families.diffusion import DiffusionModel


class TextStates(NamedTuple):
    """What a text encoder returns for prompts."""

    states_BSE: Tensor
    """One vector per token; zeros for padding."""
    mask_BS: Tensor
    """True for tokens, false for padding."""


class Conditioning(NamedTuple):
    """The condition of each sample of a batch; a field that the model does not take is None."""

    labels_B: Tensor | None = None
    """Classes, from 0; `num_classes` is no class."""
    text: TextStates | None = None
    image_BIE: Tensor | None = None
    """Embeddings of an image, that an image-to-video model attends to beside the text."""
    latents_BCTYX: Tensor | None = None
    """Latents of an image and their mask, which an image-to-video model takes as further channels."""


def null_conditioning(model: DiffusionModel, empty: TextStates | None = None) -> Conditioning:
    """Return the null value of a model's conditioning, for one sample: no class, or the states of the empty prompt."""
    if model.conditioning == "class":
        assert model.num_classes is not None
        return Conditioning(labels_B=torch.tensor([model.num_classes]))
    assert empty is not None, "a text-conditional model needs the states of the empty prompt"
    return Conditioning(text=empty)


def dropped(conditioning: Conditioning, null: Conditioning, drop_B: Tensor) -> Conditioning:
    """Return a conditioning with the null value in the samples of a boolean mask; images stay.

    `null` is of one sample or of as many as the conditioning.
    """
    labels_B, text = conditioning.labels_B, conditioning.text
    if labels_B is not None and null.labels_B is not None:
        labels_B = torch.where(drop_B, null.labels_B.to(labels_B.device), labels_B)
    if text is not None and null.text is not None:
        states = null.text.states_BSE.to(text.states_BSE)
        mask = null.text.mask_BS.to(text.mask_BS.device)
        text = TextStates(
            torch.where(drop_B.view(-1, 1, 1), states, text.states_BSE),
            torch.where(drop_B.view(-1, 1), mask, text.mask_BS),
        )
    return conditioning._replace(labels_B=labels_B, text=text)
