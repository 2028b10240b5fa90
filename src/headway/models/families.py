"""The torch module of each family."""

import torch

from headway.models.decoder import Decoder
from headway.models.deepseek import DeepSeekDecoder
from headway.models.gemma import Gemma2Decoder, Gemma3Decoder, GemmaDecoder
from headway.models.gpt2 import GPT2Decoder
from headway.models.gpt_oss import GptOssDecoder
from headway.models.llama import LlamaDecoder
from headway.models.mixtral import MixtralDecoder
from headway.models.neox import NeoXDecoder
from headway.models.olmo2 import OLMo2Decoder
from headway.models.qwen3_moe import Qwen3MoeDecoder
from headway.recipe import Model

DECODERS: dict[str, type[Decoder]] = {
    "gpt2": GPT2Decoder,
    "gpt_neox": NeoXDecoder,
    "deepseek_v3": DeepSeekDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3": Gemma3Decoder,
    "gpt_oss": GptOssDecoder,
    "llama": LlamaDecoder,
    "mistral": LlamaDecoder,
    "mixtral": MixtralDecoder,
    "olmo2": OLMo2Decoder,
    "phi3": LlamaDecoder,
    "qwen3_moe": Qwen3MoeDecoder,
    "smollm3": LlamaDecoder,
}
"""By `model.family` of a recipe."""


def empty_decoder(model: Model, device: torch.device | str = "cpu") -> Decoder:
    """Return a decoder with uninitialized weights on a device."""
    with torch.device(device):
        return DECODERS[model.family](model)
