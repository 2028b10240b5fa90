"""Text encoders: from prompts to the states that a diffusion transformer attends to. They are frozen.

A model's `text_encoder` names a Hugging Face folder, or is "bytes": a small one of Headway's, whose weights follow from
a fixed seed, so that a run needs no folder.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.diffusion.conditioning import TextStates
from headway.recipe.families.diffusion import BYTES, DiffusionModel

END = 256
"""Id of the token that ends a prompt of bytes."""
KERNEL = 5
"""Neighbours that a layer of the byte encoder mixes."""


class TextEncoder(nn.Module):
    """A frozen text encoder."""

    tokens: int
    """Tokens of a prompt, padding included."""

    def encode(self, prompts: Sequence[str]) -> TextStates:
        """Return the states of prompts; raise ModelError for one that is too long."""
        raise NotImplementedError


def open_text_encoder(model: DiffusionModel, device: torch.device | str = "cpu") -> TextEncoder:
    """Return the text encoder of a text-conditional model, with its weights, on a device."""
    assert model.text_tokens is not None, "only a text-conditional model has one"
    assert model.text_dim is not None
    if model.text_encoder == BYTES:
        return ByteTextEncoder(model.text_tokens, model.text_dim).to(device).eval().requires_grad_(False)
    raise ModelError(f"text encoder {model.text_encoder} cannot be opened yet")


def check_lengths(lengths: Sequence[int], tokens: int) -> None:
    """Raise ModelError for the first prompt that has more tokens than a text encoder takes."""
    for number, length in enumerate(lengths, 1):
        if length > tokens:
            raise ModelError(
                f"prompt {number} has {length} tokens; the text encoder takes {tokens}",
                hint="shorten it, or raise model.text_tokens where the text encoder allows it",
            )


class ByteTextEncoder(TextEncoder):
    """The bytes of a prompt, embedded and mixed with their neighbours by random layers that are never trained.

    Different prompts have different states, which is all that a model trained from scratch needs of them.
    """

    def __init__(self, tokens: int, dim: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens = tokens
        self.register_buffer("table", _random("table", (END + 1, dim), 1.0), persistent=False)
        for layer in range(layers):
            weight = _random(f"mix{layer}", (dim, dim, KERNEL), (dim * KERNEL) ** -0.5)
            self.register_buffer(f"mix{layer}", weight, persistent=False)
        self.register_buffer("places", _random("places", (tokens, dim), 0.5), persistent=False)
        self.layers = layers

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> TextStates:
        """Return the states of prompts."""
        ids = [[*prompt.encode(), END] for prompt in prompts]
        check_lengths([len(row) for row in ids], self.tokens)
        table = self.get_buffer("table")
        padded = [row + [END] * (self.tokens - len(row)) for row in ids]
        ids_BS = torch.tensor(padded, device=table.device)
        lengths_B1 = torch.tensor([[len(row)] for row in ids], device=table.device)
        mask_BS = torch.arange(self.tokens, device=table.device) < lengths_B1
        return TextStates(self(ids_BS, mask_BS), mask_BS)

    def forward(self, ids_BS: Tensor, mask_BS: Tensor) -> Tensor:
        """Return the states [B, S, E] of ids; zeros where the mask is false."""
        kept_BS1 = mask_BS.unsqueeze(2)
        x_BSE = (self.get_buffer("table")[ids_BS] + self.get_buffer("places")) * kept_BS1
        for layer in range(self.layers):
            weight = self.get_buffer(f"mix{layer}")
            mixed = nn.functional.conv1d(x_BSE.transpose(1, 2), weight, padding=KERNEL // 2).transpose(1, 2)
            x_BSE = (x_BSE + math.sqrt(2) * nn.functional.gelu(mixed)) * kept_BS1
        mean_B1E = x_BSE.sum(dim=1, keepdim=True) / kept_BS1.sum(dim=1, keepdim=True)
        return nn.functional.layer_norm(x_BSE + mean_B1E, x_BSE.shape[-1:]) * kept_BS1


def _random(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    key = hashlib.sha256(f"byte text encoder/{name}/{shape}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
