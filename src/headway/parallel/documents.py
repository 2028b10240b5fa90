"""Documents of packed rows: which models keep them apart, and places for them.

How many a pass has is known on the host, which is never made to ask the device.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from headway.kernels import dispatch, document_attention
from headway.models import Decoder
from headway.models.decoder import ContextBuilder
from headway.recipe import Recipe


def takes_documents(model: nn.Module) -> bool:
    """Whether a model supports document masking: Headway's, and classes whose forward takes `documents`."""
    return isinstance(model, Decoder) or "documents" in inspect.signature(type(model).forward).parameters


def named_documents(documents: Tensor | None) -> dict[str, Tensor]:
    """Return documents as a keyword of a forward pass, if there are any: a custom class may not know the word."""
    return {} if documents is None else {"documents": documents}


def keeps_apart(model: nn.Module, recipe: Recipe, device: torch.device, rows: int) -> bool:
    """Whether cuDNN keeps the documents of so many rows of a model apart."""
    if device.type != "cuda" or recipe.train.dtype != "bfloat16" or not isinstance(model, Decoder):
        return False
    builder, arch = model.context, recipe.model.architecture()
    if not isinstance(builder, ContextBuilder) or builder.exact or arch.value_dim != arch.head_dim:
        return False
    if not document_attention.fits(rows * recipe.data.seq, arch.heads, arch.head_dim):
        return False
    choice = dispatch.attention(
        device.type, torch.bfloat16, arch.head_dim, masked=True, capped=builder.capped, sinks=builder.sinks,
        exact=recipe.train.deterministic, documents=True,
    )  # fmt: skip
    return choice.kernel == "cudnn-ragged" and document_attention.works(arch.head_dim)


def make_places(model: nn.Module, counts: np.ndarray | None, rows: int) -> None:
    """Have passes over so many rows at a time make places for the documents, whose number in each row is given."""
    places = None
    if counts is not None:
        most = max(int(counts[low : low + rows].sum()) for low in range(0, len(counts), rows))
        places = document_attention.places_for(most)
    for module in model.modules():
        if isinstance(module, ContextBuilder):
            module.document_places = places


def exact_context(model: nn.Module) -> ContextBuilder | None:
    """Return what plans attention by documents, if a model is in exact mode."""
    builder = model.context if isinstance(model, Decoder) else None
    return builder if isinstance(builder, ContextBuilder) and builder.exact else None


@contextmanager
def planned_on_host(builder: ContextBuilder | None, documents_BL: np.ndarray | None) -> Iterator[None]:
    """Have a pass of exact mode plan its attention by the host's documents: it would wait for the device's."""
    if builder is None or documents_BL is None:
        yield
        return
    builder.host_documents = torch.from_numpy(documents_BL)
    try:
        yield
    finally:
        builder.host_documents = None  # other passes have other documents
