"""Text encoders: from prompts to the states that a diffusion transformer attends to. They are frozen.

A model's `text_encoder` names a Hugging Face folder, or is "bytes": a small one of Headway's, whose weights follow from
a fixed seed, so that a run needs no folder.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.data.media.text_tokens import CLIP_TYPES, folder_tokenizer, positions_of
from headway.errors import ModelError
from headway.models.diffusion import clip, t5
from headway.models.diffusion.clip import ClipTextEncoder
from headway.models.diffusion.conditioning import TextStates
from headway.models.diffusion.t5 import T5Encoder
from headway.models.transfer import on_device
from headway.recipe.families.diffusion import BYTES, DiffusionModel
from headway.recipe.huggingface import read_config
from headway.state.huggingface import weight_files

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
    encoder: TextEncoder
    if model.text_encoder == BYTES:
        encoder = ByteTextEncoder(model.text_tokens, model.text_dim)
    else:
        encoder = FolderTextEncoder(Path(str(model.text_encoder)), model.text_tokens)
        if encoder.width != model.text_dim:
            raise ModelError(
                f"model.text_dim is {model.text_dim}, but {model.text_encoder} has states of width {encoder.width}",
                hint=f"--set model.text_dim={encoder.width}",
            )
    return encoder.to(device).eval().requires_grad_(False)


def check_lengths(lengths: Sequence[int], tokens: int) -> None:
    """Raise ModelError for the first prompt that has more tokens than a text encoder takes."""
    for number, length in enumerate(lengths, 1):
        if length > tokens:
            raise ModelError(
                f"prompt {number} has {length} tokens; the text encoder takes {tokens}",
                hint="shorten it, or raise model.text_tokens where the text encoder allows it",
            )


class FolderTextEncoder(TextEncoder):
    """T5, UMT5 or CLIP from a Hugging Face folder, with its tokenizer."""

    def __init__(self, folder: Path, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.module, self.width, longest = read_text_encoder(folder)
        if longest is not None and tokens > longest:
            raise ModelError(
                f"model.text_tokens is {tokens}, but {folder} has positions for {longest}",
                hint=f"--set model.text_tokens={longest}",
            )
        self._tokenizer = folder_tokenizer(folder)
        self._padding = read_config(folder).get("pad_token_id") or 0

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> TextStates:
        """Return the states of prompts."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(prompts))]
        check_lengths([len(row) for row in ids], self.tokens)
        device = next(self.module.parameters()).device
        ids_BS, mask_BS = padded(ids, self.tokens, self._padding, device)
        return TextStates(self.module(ids_BS, mask_BS) * mask_BS.unsqueeze(2), mask_BS)


def padded(ids: Sequence[Sequence[int]], tokens: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids [B, S] with padding at their ends, and a mask of what is no padding."""
    rows = [[*row, *[padding] * (tokens - len(row))] for row in ids]
    mask_BS = torch.arange(tokens) < torch.tensor([[len(row)] for row in ids])
    return on_device(torch.tensor(rows), device), on_device(mask_BS, device)


def read_text_encoder(folder: Path) -> tuple[nn.Module, int, int | None]:
    """Return a folder's text encoder, the width of its states, and the most tokens it has positions for."""
    config = read_config(folder)
    kind, longest = config.get("model_type"), positions_of(config)
    if kind in ("t5", "umt5"):
        build, stored = T5Encoder, t5.stored_name
        width = config.get("d_model", 0)
    elif kind in CLIP_TYPES:
        config = config.get("text_config") or config
        build, stored = ClipTextEncoder, clip.stored_name
        width = config.get("hidden_size", 0)
    else:
        raise ModelError(
            f"{folder} is a {kind}, which is no text encoder that Headway has", hint="t5, umt5 or clip_text_model"
        )
    try:
        with torch.device("meta"):
            module: nn.Module = build(config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error.args[0]}") from None
    weights = _weights(folder)
    for name, parameter in module.named_parameters():
        names = (stored(name), t5.plain_name(stored(name)), f"text_model.{stored(name)}")
        weight = next((weights[key] for key in names if key in weights), None)
        if weight is None:
            raise ModelError(f"{folder} lacks {names[0]}")
        if weight.shape != parameter.shape:
            raise ModelError(f"{folder} has {names[0]} of shape {tuple(weight.shape)}, not {tuple(parameter.shape)}")
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, nn.Parameter(weight, requires_grad=False))
    return module, width, longest


def _weights(folder: Path) -> dict[str, Tensor]:
    weights = dict[str, Tensor]()
    for file in weight_files(folder):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {file}: {error}") from None
    return weights


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
        ids_BS, mask_BS = padded(ids, self.tokens, END, self.get_buffer("table").device)
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
