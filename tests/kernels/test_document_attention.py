"""Attention of packed documents by cuDNN over ragged rows, with a stand-in for cuDNN on the CPU, equals that of each
document alone; and the places that documents get."""

import sys
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace

import fake_cudnn
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.kernels import cudnn_ragged, dispatch, document_attention
from headway.kernels.document_attention import document_starts, places_for
from headway.models import empty_decoder, init_weights
from headway.models.attention import attend_all, see
from headway.parallel.documents import make_places
from headway.parallel.objective import count_documents
from headway.parallel.recompute import recompute as recompute_blocks
from headway.recipe import Model


@pytest.fixture
def cudnn_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn)
    monkeypatch.setattr(cudnn_ragged.torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(cudnn_ragged, "_handle", lambda _: "handle")
    caches = (cudnn_ragged.library, cudnn_ragged._forward_plan, cudnn_ragged._backward_plan)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def numbered(*rows: list[int]) -> Tensor:
    """Document numbers of rows of documents of these lengths."""
    return torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in rows], dtype=torch.int32)


def samples(documents: Tensor, heads: int, kv_heads: int, head: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*documents.shape, count, head) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def both_passes(mask: object, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend_all(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows"),
    [(4, 2, [[7, 1, 8], [16], [3, 13]]), (3, 3, [[16], [16], [16]]), (4, 1, [[1] * 16, [2] * 8, [15, 1]])],
)
def test_output_and_gradients_are_those_of_the_mask(heads: int, kv_heads: int, rows: list[list[int]]) -> None:
    documents = numbered(*rows)
    tensors = samples(documents, heads, kv_heads, 8)
    places = places_for(int(count_documents(documents.numpy()).sum()))
    masks = see(16, {None}, documents, torch.device("cpu"), "masked", places=places)
    plain = see(16, {None}, documents, torch.device("cpu"), "masked")
    got = both_passes(masks[None], *tensors)
    want = both_passes(plain[None], *(x.float() for x in tensors))
    for ours, truth in zip(got, want, strict=True):
        assert (ours.float() - truth).norm() < 1e-2 * truth.norm()


@pytest.mark.usefixtures("cudnn_on_cpu")
def test_tensors_that_are_parts_of_others_are_read_where_they_are() -> None:
    """Queries, keys and values as one projection leaves them: heads of a token side by side."""
    documents = numbered([5, 11], [16])
    q, k, v, dout = samples(documents, 4, 2, 8)
    joined = torch.cat([q, k, v], dim=2)
    parts = joined.split((4, 2, 2), dim=2)
    mask = document_starts(documents, 16)
    for ours, truth in zip(both_passes(mask, *parts, dout), both_passes(mask, q, k, v, dout), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.usefixtures("cudnn_on_cpu")
def test_the_compiler_is_told_what_the_operation_returns() -> None:
    documents = numbered([5, 11], [16])
    q, k, v, _ = samples(documents, 4, 2, 8)
    starts = document_starts(documents, 16)
    arguments = (*(x.requires_grad_() for x in (q, k, v)), starts.starts_S1, starts.longest, 0.35, False)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.headway.document_attention.default, arguments, test_utils=checks)


@pytest.mark.usefixtures("cudnn_on_cpu")
def test_a_model_has_the_loss_and_gradients_of_masks() -> None:
    decoder = empty_decoder(Model(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=50))
    init_weights(decoder, 0)
    documents = numbered([9, 7], [16])
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))
    results = []
    for counts in (None, count_documents(documents.numpy())):
        make_places(decoder, counts, rows=2)
        decoder.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = decoder(tokens[:, :-1], tokens[:, 1:], documents)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in decoder.parameters())])
    assert not torch.equal(results[0][1], results[1][1]), "the same kernel ran"
    for masked, ragged in zip(*results, strict=True):
        assert (ragged - masked).norm() <= 3e-2 * masked.norm()


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler looks at
@pytest.mark.parametrize("recompute", ["none", "except-attention"])
def test_compiled_blocks_take_any_number_of_documents_without_compiling_again(recompute: str) -> None:
    decoder = empty_decoder(Model(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=50))
    init_weights(decoder, 0)
    blocks = [block.forward for block in decoder.layers]
    tokens = torch.randint(50, (2, 65), generator=torch.Generator().manual_seed(1))
    documents = [numbered([9, 55], [64]), numbered([64], [2] * 32)]

    def step(number: int) -> list[Tensor]:
        make_places(decoder, count_documents(documents[number].numpy()), rows=2)
        decoder.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = decoder(tokens[:, :-1], tokens[:, 1:], documents[number])
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in decoder.parameters())]

    plain = [step(number) for number in range(2)]
    recompute_blocks(list(decoder.layers), recompute, None)
    for block in decoder.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    compiled = [step(0)]
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled.append(step(1))
    for block, forward in zip(decoder.layers, blocks, strict=True):
        block.forward = forward
    for ours, truth in zip(chain(*compiled), chain(*plain), strict=True):
        assert (ours - truth).norm() <= 3e-2 * truth.norm()


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3))
def test_starts_are_where_documents_begin(rows: list[list[int]]) -> None:
    length = max(map(sum, rows))
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in rows]
    lengths = [document for row in rows for document in row]
    counts = count_documents(numbered(*rows).numpy())
    assert counts.tolist() == [len(row) for row in rows]
    starts = document_starts(numbered(*rows), places_for(len(lengths)))
    begins = np.cumsum([0, *lengths])
    assert starts.starts_S1[: len(begins)].tolist() == begins.tolist()
    assert set(starts.starts_S1[len(begins) :].tolist()) <= {len(rows) * length}
    assert starts.longest == length


@given(st.integers(1, 10_000))
def test_places_are_enough_and_few_numbers(documents: int) -> None:
    places = places_for(documents)
    assert documents <= places < max(17, 1.5 * documents)
    assert places in {16, *(2**k for k in range(4, 15)), *(3 * 2**k for k in range(3, 14))}


def test_documents_go_to_cudnn_where_its_frontend_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"masked": True, "capped": False, "sinks": False, "exact": False, "documents": True}
    monkeypatch.setattr(dispatch, "_latest", lambda: True)
    for there, kernel in ((True, "cudnn-ragged"), (False, "flex")):
        monkeypatch.setattr(document_attention, "installed", lambda there=there: there)
        assert dispatch.attention("cuda", torch.bfloat16, 64, **asked).kernel == kernel
        assert dispatch.attention("cuda", torch.float32, 64, **asked).kernel == "flex"
        assert dispatch.attention("cuda", torch.bfloat16, 256, **asked).kernel == "flex"
        assert dispatch.attention("cuda", torch.bfloat16, 64, **asked | {"sinks": True}).kernel == "flex"
        assert dispatch.attention("cpu", torch.bfloat16, 64, **asked).kernel == "masked"


def test_without_a_gpu_it_does_not_work_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(document_attention, "installed", lambda: True)
    document_attention.works.cache_clear()
    assert not document_attention.works(64)
    assert "stays with flex attention" in caplog.text
    document_attention.works.cache_clear()
