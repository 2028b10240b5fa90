"""Features of images by a CLIP vision encoder from a Hugging Face folder, for the Frechet distance."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headway.errors import ModelError
from headway.inference.frechet import frechet_distance, moments
from headway.models.diffusion import clip
from headway.models.layers import LayerNorm
from headway.recipe.huggingface import read_config
from headway.state.huggingface import weight_files

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's pixels, where the folder has no preprocessor_config.json."""
BATCH = 64


class ClipImageEncoder(nn.Module):
    """CLIP's vision model, up to the normalized state of its class token."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim, self.size, patch = config["hidden_size"], config["image_size"], config["patch_size"]
        eps = config.get("layer_norm_eps", 1e-5)
        self.token = nn.Parameter(torch.empty(dim))
        self.patch = nn.Conv2d(3, dim, patch, stride=patch, bias=False)
        self.positions = nn.Embedding((self.size // patch) ** 2 + 1, dim)
        self.first_norm = LayerNorm(dim, eps)
        self.layers = nn.ModuleList(clip.Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = LayerNorm(dim, eps)

    def forward(self, images_NCYX: Tensor) -> Tensor:
        """Return features [N, D] of normalized images of the encoder's size."""
        patches_NLD = self.patch(images_NCYX).flatten(2).transpose(1, 2)
        token_N1D = self.token.expand(len(images_NCYX), 1, -1)
        x_NLD = self.first_norm(torch.cat([token_N1D, patches_NLD], dim=1) + self.positions.weight)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=x_NLD.device)
        for block in self.layers:
            x_NLD = block(x_NLD, mask)
        out_ND: Tensor = self.norm(x_NLD[:, 0])
        return out_ND


class FeatureNetwork:
    """A frozen image encoder: pixels to features."""

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        config = read_config(folder)
        if config.get("model_type") not in ("clip", "clip_vision_model"):
            raise ModelError(
                f"{folder} is a {config.get('model_type')}, which is no image encoder that Headway has",
                hint="clip, or clip_vision_model",
            )
        self.encoder = _loaded(config.get("vision_config") or config, folder).to(device).eval().requires_grad_(False)
        self._device = device
        self._mean, self._std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in _scale(folder))

    @torch.no_grad()
    def features(self, pixels_NYXC: Tensor) -> Tensor:
        """Return features [N, D] of RGB pixels (uint8) of any size."""
        parts = []
        for batch in pixels_NYXC.split(BATCH):
            images = batch.to(self._device).movedim(-1, 1).float() / 255
            sizes = (self.encoder.size, self.encoder.size)
            images = nn.functional.interpolate(images, sizes, mode="bicubic", antialias=True).clamp(0, 1)
            parts.append(self.encoder((images - self._mean) / self._std).cpu())
        return torch.cat(parts)


def distance_of_images(network: FeatureNetwork, first_NYXC: Tensor, second_NYXC: Tensor) -> float:
    """Return the Frechet distance between two sets of images in a network's features."""
    first, second = (moments(network.features(pixels).numpy()) for pixels in (first_NYXC, second_NYXC))
    return frechet_distance(first, second)


def _loaded(config: Mapping[str, Any], folder: Path) -> ClipImageEncoder:
    try:
        encoder = ClipImageEncoder(config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error.args[0]}") from None
    weights = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    for name, parameter in encoder.named_parameters():
        stored = _stored_name(name)
        tensor = weights.get(f"vision_model.{stored}", weights.get(stored))
        if tensor is None or tensor.shape != parameter.shape:
            what = "lacks" if tensor is None else f"has shape {tuple(tensor.shape)} for"
            raise ModelError(f"{folder} {what} {stored}", hint="name the folder of a CLIP model")
        parameter.data.copy_(tensor)
    return encoder


def _stored_name(name: str) -> str:
    outside = {
        "token": "embeddings.class_embedding",
        "patch.weight": "embeddings.patch_embedding.weight",
        "positions.weight": "embeddings.position_embedding.weight",
    }
    norms = {"first_norm": "pre_layrnorm", "norm": "post_layernorm"}
    module, _, kind = name.rpartition(".")
    if module in norms:
        return f"{norms[module]}.{kind}"
    return outside.get(name) or clip.stored_name(name)


def _scale(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation that pixels are normalized with."""
    try:
        settings = json.loads((folder / "preprocessor_config.json").read_bytes())
        return tuple(settings["image_mean"]), tuple(settings["image_std"])
    except (OSError, ValueError, KeyError, TypeError):
        return MEAN, STD
