"""Paged attention against sums over a float64 softmax, in PyTorch, Triton's interpreter, and on a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.kernels import dispatch
from headway.kernels.latent_attention import LatentTiling, is_latent, latent_attention
from headway.kernels.latent_attention import cut as latent_cut
from headway.kernels.paged_attention import choose, paged_attention, store
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_reference import reference
from headway.kernels.paged_triton import PagedTiling, cut, triton_attention
from thinned import examples

Case = tuple[Tensor, Tensor, Tensor, PagedBatch, list[tuple[Tensor, Tensor]]]


def draw(
    spans: list[tuple[int, int]], heads: tuple[int, int], size: int, page: int, dtype: torch.dtype, device: str = "cpu"
) -> Case:
    """Sequences of (new tokens, all tokens) with pages in random order; also each one's keys and values in a row."""
    generator = torch.Generator().manual_seed(sum(total for _, total in spans) + size)
    pages = sum(-(-total // page) for _, total in spans) + 3
    order = torch.randperm(pages, generator=generator).tolist()
    keys, values = (torch.full((pages, page, heads[1], size), 7.0) for _ in range(2))
    keys, values = keys.to(dtype), values.to(dtype)
    q = torch.randn(sum(new for new, _ in spans), heads[0], size, generator=generator).to(dtype)
    starts, tables, whole, slots = [0], [], [], []
    for new, total in spans:
        k, v = (torch.randn(total, heads[1], size, generator=generator).to(dtype) for _ in range(2))
        table = [order.pop() for _ in range(-(-total // page))]
        places = torch.tensor([table[p // page] * page + p % page for p in range(total)])
        store(k, keys, places)
        store(v, values, places)
        starts.append(starts[-1] + new)
        slots += places[total - new :].tolist()
        tables.append(table)
        whole.append((k, v))
    widest = max(map(len, tables))
    batch = PagedBatch(
        starts=tuple(starts),
        lengths=tuple(total for _, total in spans),
        starts_S1=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths_S=torch.tensor([total for _, total in spans], dtype=torch.int32, device=device),
        tables_SP=torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32, device=device),
        slots_T=torch.tensor(slots, device=device),
    )
    return q.to(device), keys.to(device), values.to(device), batch, whole


def exact(case: Case, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """By the definition, in float64."""
    q, _, _, batch, whole = case
    out = torch.zeros(*q.shape[:2], whole[0][1].shape[2], dtype=torch.float64)
    for i, (k, v) in enumerate(whole):
        count = batch.starts[i + 1] - batch.starts[i]
        share = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
        for j in range(count):
            row, position = batch.starts[i] + j, batch.lengths[i] - count + j
            first = 0 if window is None else max(position - window + 1, 0)
            scores = torch.einsum("nh,anh->na", q[row].double().cpu(), k[first : position + 1]) * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().cpu().unsqueeze(1)), dim=1)
            weights = scores.softmax(1)[:, : position + 1 - first]
            out[row] = torch.einsum("na,anh->nh", weights, v[first : position + 1])
    return out


OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"softcap": 3.0}, {"sunk": True}, {"window": 3, "sunk": True}]


def check(case: Case, run: Any, tolerance: float, window=None, softcap=None, sunk=False, scale=None, **more) -> None:
    q = case[0]
    scale = scale or q.shape[-1] ** -0.5
    sinks = torch.linspace(-1, 1, q.shape[1], device=q.device) if sunk else None
    actual = run(*case[:4], scale, window, softcap, sinks, **more)
    truth = exact(case, scale, window, softcap, sinks)
    assert actual.dtype == q.dtype
    torch.testing.assert_close(actual.double().cpu(), truth, rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=5), st.sampled_from(OPTIONS),
    st.sampled_from([(4, 2), (3, 3), (6, 1)]), st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_reference(spans, options, heads, page) -> None:
    case = draw([(new, new + before) for new, before in spans], heads, 8, page, torch.float32)
    check(case, reference, 1e-5, **options)


CASES = {
    "decode": ([(1, 9), (1, 1), (1, 40)], (6, 2), 16, 4, None),
    "split": ([(1, 70), (1, 3)], (4, 2), 16, 4, PagedTiling(1, 16, 16, 4, 4)),
    "prefill": ([(7, 7), (5, 21)], (3, 1), 20, 16, PagedTiling(4, 16, 16, 1, 4)),
    "mixed": ([(1, 30), (6, 6), (1, 2), (3, 19)], (8, 4), 16, 8, PagedTiling(8, 16, 16, 1, 4)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "cap", "sinks", "window and sinks"])
def test_kernel_in_the_interpreter(name: str, options: dict[str, Any]) -> None:
    spans, heads, size, page, tiling = CASES[name]
    check(draw(spans, heads, size, page, torch.float32), triton_attention, 1e-5, tiling=tiling, **options)


def test_pages_may_keep_the_tokens_of_a_head_together() -> None:
    """As those of a GPU do."""
    q, keys, values, batch, _ = draw([(1, 9), (6, 21)], (4, 2), 16, 4, torch.float32)
    truth = reference(q, keys, values, batch, 0.25)
    turned = [torch.zeros(len(x), 2, 4, 16).transpose(1, 2) for x in (keys, values)]
    places = torch.arange(keys.shape[0] * keys.shape[1])
    for pages, x in zip(turned, (keys, values), strict=True):
        store(x.flatten(0, 1), pages, places)
        assert pages.stride(1) < pages.stride(2)
    for run in (reference, triton_attention):
        torch.testing.assert_close(run(q, *turned, batch, 0.25), truth)


def test_tilings_fill_the_device() -> None:
    batch = draw([(1, 4096)], (8, 2), 4, 16, torch.float32)[3]
    assert cut(batch, 4, 2, 64, processors=132).splits * 2 <= 2 * 132
    assert cut(batch, 4, 2, 64, processors=132).splits >= 16
    many = draw([(1, 40)] * 200, (8, 2), 4, 16, torch.float32)[3]
    assert cut(many, 4, 2, 64, processors=132).splits == 1
    prompts = draw([(9, 9)], (8, 2), 4, 16, torch.float32)[3]
    assert cut(prompts, 4, 2, 64, processors=132).queries == 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "cap", "sinks", "window and sinks"])
@pytest.mark.parametrize(("heads", "size"), [((16, 8), 128), ((9, 3), 64), ((8, 1), 256), ((4, 4), 80)])
def test_kernel_on_a_gpu(dtype: torch.dtype, options: dict[str, Any], heads: tuple[int, int], size: int) -> None:
    for spans in ([(1, 3000), (1, 17)], [(1, 100)] * 70, [(300, 300), (70, 500), (1, 90), (1, 1)]):
        options = options | ({"window": 100} if "window" in options else {})
        case = draw(spans, heads, size, 16, dtype, "cuda")
        check(case, triton_attention, 2e-2 if dtype == torch.bfloat16 else 1e-4, **options)
        assert math.isfinite(float(case[0].float().sum()))


# -- latent vectors

LATENT = {
    "decode": ([(1, 9), (1, 1), (1, 40)], 6, LatentTiling(16, 16, 1, 4)),
    "split": ([(1, 70), (1, 3)], 20, LatentTiling(16, 16, 4, 4)),
    "mixed": ([(1, 30), (6, 6), (3, 19)], 4, None),
}


def draw_latent(
    spans: list[tuple[int, int]], heads: int, sizes: tuple[int, int], dtype: torch.dtype, device: str
) -> Case:
    """One head of keys, whose first entries are the values."""
    q, keys, _, batch, whole = draw(spans, (heads, 1), sum(sizes), 8, dtype, device)
    return q, keys, keys[..., : sizes[0]], batch, [(k, k[..., : sizes[0]]) for k, _ in whole]


@pytest.mark.parametrize("name", LATENT)
def test_latent_vectors_in_the_interpreter(name: str) -> None:
    """Of 24 entries besides 6 rotated ones, neither of which is a power of two."""
    spans, heads, tiling = LATENT[name]
    case = draw_latent(spans, heads, (24, 6), torch.float32, "cpu")
    actual = latent_attention(case[0], case[1], case[3], 0.3, 24, tiling)
    torch.testing.assert_close(actual.double(), exact(case, 0.3, None, None, None), rtol=1e-5, atol=1e-5)


def test_a_cache_of_latent_vectors_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values, batch, _ = draw_latent([(1, 9), (2, 12)], 4, (16, 8), torch.float32, "cpu")
    truth = paged_attention(q, keys, values, batch, scale=0.3)
    monkeypatch.setattr(dispatch, "devices", ("cuda", "cpu"))
    cpu = torch.device("cpu")
    assert choose(cpu, 24, 16, latent=is_latent(keys, values)).kernel == "latent"
    torch.testing.assert_close(paged_attention(q, keys, values, batch, scale=0.3), truth)
    assert not is_latent(keys, values.clone())
    assert choose(cpu, 576, 512, latent=False).kernel == "pytorch"
    assert choose(cpu, 1088, 1024, latent=True).kernel == "pytorch"
    assert choose(cpu, 128, 128).kernel == "triton"


def test_latent_tilings_fill_the_device() -> None:
    assert latent_cut(1, 4096, 128, 132).splits == 32
    assert latent_cut(256, 4096, 128, 132).splits == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_vectors_on_a_gpu(dtype: torch.dtype) -> None:
    """DeepSeek-V3's sizes."""
    for spans in ([(1, 3000), (1, 17)], [(1, 100)] * 70, [(70, 500), (1, 90), (1, 1)]):
        case = draw_latent(spans, 128, (512, 64), dtype, "cuda")
        actual = latent_attention(case[0], case[1], case[3], 576**-0.5, 512)
        truth = exact(case, 576**-0.5, None, None, None)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(actual.double().cpu(), truth, rtol=tolerance, atol=tolerance)
