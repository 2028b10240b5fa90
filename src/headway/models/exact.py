"""Exact mode: training and inference give a token the same bits.

A plain decoder computes a token by kernels that are chosen by the shape of its batch, and differ in the last bits. In
exact mode everything that a token passes through is batch-invariant, and the same in training and inference:

                       CPU, float32                                GPU, bfloat16
    products           tiles of rows of one shape                  sums in order, by cuBLAS where it has their bits
                       kernels/batch_invariant.py                  kernels/exact_products.py
    attention          tiles of keys from the sequence's start, in one order for a whole sequence, any packing of
                       documents into rows, and pages
                       kernels/batch_invariant_attention.py        kernels/exact_attention.py, paged_triton.py
    positions          restart in every document
    norms, rotation    PyTorch's, which go row by row              Triton's, whatever the size of a tensor
    SiLU               by exp, whose bits do not depend on         Triton's
                       the place in memory
    log-probabilities  over the whole vocabulary, in float32; on GPUs summed as the sampler does: kernels/sampling.py

Gradients are those of the plain kernels. A trainer's float32 weights are rounded to bfloat16 in every pass, as those of
its engine are.
"""

from functools import partial

import torch
from torch import nn

from headway.errors import ModelError
from headway.kernels import batch_invariant, exact_products, rms_norm
from headway.kernels import dispatch as table
from headway.models.decoder import Decoder
from headway.models.experts import Experts
from headway.models.layers import GatedFeedForward, Linear, RMSNorm, gated
from headway.models.llama import LlamaDecoder
from headway.models.lora import LoraLinear, is_adapter
from headway.models.mixtral import MixtralDecoder
from headway.models.olmo2 import OLMo2Decoder
from headway.models.qwen3_moe import Qwen3MoeDecoder
from headway.recipe.rope import RotaryModel

HEADS = (64, 128)
"""Sizes of heads that exact mode takes on GPUs."""
EXACT_DECODERS = (LlamaDecoder, MixtralDecoder, OLMo2Decoder, Qwen3MoeDecoder)
exact_swiglu = partial(gated, batch_invariant.silu)


def make_exact(model: nn.Module, device: torch.device, products: torch.dtype | None = None) -> None:
    """Have a model give a token the same bits in every batch, in training and inference, in place.

    The model may still be on the meta device, but not yet be parallelized. `products` is a trainer's precision of
    products, which its weights are rounded to in every pass; else it is that of the weights. Raise ModelError where
    that is not possible.
    """
    decoder = _checked(model, device, products)
    for module in decoder.modules():
        if isinstance(module, Linear | Experts | RMSNorm):
            module.exact = True
        if isinstance(module, GatedFeedForward | Experts):
            module.activation = batch_invariant.silu if isinstance(module, GatedFeedForward) else exact_swiglu
    decoder.context.exact = True
    decoder.loss.exact = True


def _checked(model: nn.Module, device: torch.device, products: torch.dtype | None) -> Decoder:
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
        dtype = products or parameter.dtype
        if table.batch_invariant(device.type, dtype) is None and not is_adapter(name):
            raise ModelError(
                f"exact mode has no kernels for {str(dtype).removeprefix('torch.')} on {device.type} yet, "
                f"which {name} is in",
                hint="float32 on a CPU, bfloat16 on a GPU, or leave inference.exact out",
            )
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not _known(module):
            raise ModelError(
                f"exact mode does not support {type(module).__name__}, and {name} is one",
                hint="leave lora.quantize and adapters of requests out",
            )
    if table.exact_triton(device):
        _check_triton(model, device)
    else:
        _check_tiles(model, device)
    return model


def _check_tiles(model: Decoder, device: torch.device) -> None:
    """Check what depends on the libraries of a CPU, by trying it."""
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


def _check_triton(model: Decoder, device: torch.device) -> None:
    """Check the sizes that kernels take on a GPU. What cuBLAS does is tried in the first passes."""
    section = model.model
    if section.head_dim not in HEADS:
        raise ModelError(
            f"exact mode on GPUs takes heads of 64 or 128, and this model's are of {section.head_dim}",
            hint="leave inference.exact out",
        )
    if isinstance(section, RotaryModel) and section.rotary_dim != section.head_dim:
        raise ModelError(
            f"exact mode on GPUs rotates whole heads, and this model {section.rotary_dim} of {section.head_dim} dims",
            hint="leave inference.exact out",
        )
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm) and len(module.weight) > rms_norm.MAX_WIDTH:
            raise ModelError(
                f"exact mode on GPUs takes norms of at most {rms_norm.MAX_WIDTH} elements, and {name} has "
                f"{len(module.weight)}",
                hint="leave inference.exact out",
            )
        if isinstance(module, Experts) and device.type == "cuda":
            _check_experts(name, module, device)
    odd = [(outputs, inputs) for outputs, inputs in sorted(_shapes(model)) if inputs % exact_products.MULTIPLE]
    if odd:
        raise ModelError(
            f"exact mode on GPUs takes matrices whose inputs are a multiple of {exact_products.MULTIPLE}, and one is "
            f"{odd[0][0]} x {odd[0][1]}",
            hint="leave inference.exact out",
        )


def _check_experts(name: str, module: Experts, device: torch.device) -> None:
    if module.gate_bias is not None or not module.grouped_on(device):
        return  # a loop over the products of one expert each
    for matrices_EOD in (module.gate, module.down):
        if not exact_products.grouped_agrees(*matrices_EOD.shape, device):
            raise ModelError(
                f"here the grouped product of {name} adds up in another order than one product per expert",
                hint='train.plain = ["experts"], or leave inference.exact out',
            )


def _known(module: Linear) -> bool:
    return type(module) is Linear or (isinstance(module, LoraLinear) and module.weight_codes is None)


def _shapes(model: Decoder) -> set[tuple[int, int]]:
    """Return the shapes of all matrices, [outputs, inputs]."""
    matrices = [parameter.shape[-2:] for parameter in model.parameters() if parameter.dim() > 1]
    return {(int(outputs), int(inputs)) for outputs, inputs in matrices}
