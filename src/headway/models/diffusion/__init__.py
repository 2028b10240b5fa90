"""Diffusion transformers: plain modules from a noisy sample, a time and a conditioning to a prediction."""

from headway.models.diffusion.conditioning import Conditioning, TextStates, dropped, null_conditioning
from headway.models.diffusion.dit import DiffusionDiT
from headway.models.diffusion.families import TRANSFORMERS, empty_transformer
from headway.models.diffusion.text_encoders import TextEncoder, open_text_encoder
from headway.models.diffusion.transformer import DiffusionTransformer
from headway.models.diffusion.wan import WanTransformer

__all__ = [
    "TRANSFORMERS",
    "Conditioning",
    "DiffusionDiT",
    "DiffusionTransformer",
    "TextEncoder",
    "TextStates",
    "WanTransformer",
    "dropped",
    "empty_transformer",
    "null_conditioning",
    "open_text_encoder",
]
