"""Exact mode: training and inference give a token the same bits.

A plain decoder computes a token by kernels that are chosen by the shape of its batch, and differ in the last bits. In
exact mode everything that a token passes through is batch-invariant, and the same in training and inference:

    products            tiles of rows of one shape         kernels/batch_invariant.py
    attention           tiles of keys from the sequence's start, in one order for a whole sequence, any packing of
                        documents into rows, and pages     kernels/batch_invariant_attention.py
    positions           restart in every document
    norms, softmax      PyTorch's, which go row by row
    SiLU                by exp, whose bits do not depend on the place in memory
    log-probabilities   over the whole vocabulary, in float32

Gradients are those of the plain kernels.
"""

from functools import partial

import torch
from torch import nn

from headway.errors import ModelError
from headway.kernels import batch_invariant
from headway.kernels import dispatch as table
from headway.models.decoder import Decoder
from headway.models.experts import Experts
from headway.models.layers import GatedFeedForward, Linear, gated
from headway.models.llama import LlamaDecoder
from headway.models.lora import LoraLinear
from headway.models.mixtral import MixtralDecoder
from headway.models.olmo2 import OLMo2Decoder
from headway.models.qwen3_moe import Qwen3MoeDecoder
from headway.recipe.rope import RotaryModel

EXACT_DECODERS = (LlamaDecoder, MixtralDecoder, OLMo2Decoder, Qwen3MoeDecoder)
exact_swiglu = partial(gated, batch_invariant.silu)


def make_exact(model: nn.Module, device: torch.device) -> None:
    """Have a model give a token the same bits in every batch, in training and inference, in place.

    The model may still be on the meta device, but not yet be parallelized. Raise ModelError where that is not possible.
    """
    decoder = _checked(model, device)
    for module in decoder.modules():
        if isinstance(module, Linear | Experts):
            module.exact = True
        if isinstance(module, GatedFeedForward | Experts):
            module.activation = batch_invariant.silu if isinstance(module, GatedFeedForward) else exact_swiglu
    decoder.context.exact = True
    decoder.loss.exact = True


def _checked(model: nn.Module, device: torch.device) -> Decoder:
    """Return the model; raise ModelError if a token's bits may depend on its batch."""
    if not isinstance(model, EXACT_DECODERS):
        family = model.model.family if isinstance(model, Decoder) else type(model).__name__
        raise ModelError(
            f"exact mode does not support {family} yet",
            hint="it knows llama, mistral, qwen2, qwen3, smollm3, phi3, olmo2, mixtral and qwen3_moe",
        )
    if isinstance(model.model, RotaryModel) and model.model.switch_length is not None:
        raise ModelError(
            "exact mode does not support longrope, whose frequencies depend on the length of the whole row",
            hint="leave inference.exact out",
        )
    for name, parameter in model.named_parameters():
        if table.batch_invariant(device.type, parameter.dtype) is None:
            raise ModelError(
                f"exact mode has no kernels for {str(parameter.dtype).removeprefix('torch.')} on {device.type} yet, "
                f"which {name} is in",
                hint="float32 on a CPU, or leave inference.exact out",
            )
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not _known(module):
            raise ModelError(
                f"exact mode does not support {type(module).__name__}, and {name} is one",
                hint="leave lora.quantize and adapters of requests out",
            )
    if not batch_invariant.elements_are_independent(device.type):
        raise ModelError(
            "here exp or cos has other bits in another place of a vector",
            hint="use another build of PyTorch, or leave inference.exact out",
        )
    for outputs, inputs in sorted(_shapes(model)):
        if not batch_invariant.rows_are_independent(outputs, inputs, device.type):
            raise ModelError(
                f"here a row times a matrix of {outputs} x {inputs} has other bits in another place of its tile",
                hint="use another build of PyTorch, or leave inference.exact out",
            )
    return model


def _known(module: Linear) -> bool:
    return type(module) is Linear or (isinstance(module, LoraLinear) and module.weight_codes is None)


def _shapes(model: Decoder) -> set[tuple[int, int]]:
    """Return the shapes of all matrices, [outputs, inputs]."""
    matrices = [parameter.shape[-2:] for parameter in model.parameters() if parameter.dim() > 1]
    return {(int(outputs), int(inputs)) for outputs, inputs in matrices}
