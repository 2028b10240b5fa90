"""Attention of two kernels, with CPU kernels in place of cuDNN's and flash's, equals attention in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headway.kernels import repeatable_attention
from headway.models.attention import attend_fully, query_parts

aten = torch.ops.aten
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def kernels_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward_pass(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, statistic = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out, statistic.unsqueeze(-1)  # as cuDNN shapes it

    monkeypatch.setattr(repeatable_attention, "forward_pass", forward_pass)
    monkeypatch.setattr(repeatable_attention, "backward_pass", lambda *tensors: backward(*tensors, 0.0, False))


def samples(
    queries: int, keys: int, head: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, queries, 3, head), (2, keys, 3, head), (2, keys, 3, head), (2, queries, 3, head))
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]


def gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("blnh,bsnh->bnls", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bnls,bsnh->blnh", scores.softmax(dim=-1), v)


@pytest.mark.parametrize(("queries", "keys", "head"), [(7, 7, 16), (5, 12, 24)])
@pytest.mark.usefixtures("kernels_of_cpu")
def test_output_and_gradients_equal_those_of_float64(queries: int, keys: int, head: int) -> None:
    q, k, v, grad = samples(queries, keys, head)
    got = gradients(repeatable_attention.attention, q, k, v, grad)
    want = gradients(reference, *(x.double() for x in (q, k, v, grad)))
    for ours, truth in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernels_of_cpu")
def test_the_compiler_is_told_the_shapes_and_strides_that_the_operation_returns() -> None:
    tensors = tuple(x.requires_grad_() for x in samples(5, 6, 16)[:3])
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.headway.repeatable_attention.default, tensors, test_utils=checks)


def test_without_the_kernels_attention_stays_with_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has neither, as an old GPU or another PyTorch."""
    monkeypatch.setattr("headway.models.attention.choose", lambda *_, **__: "cudnn-flash")
    repeatable_attention.works.cache_clear()
    q, k, v, _ = samples(5, 6, 16)
    assert not repeatable_attention.works(16)
    torch.testing.assert_close(attend_fully(q, k, v), reference(q, k, v), rtol=1e-4, atol=1e-5)
    repeatable_attention.works.cache_clear()


def test_queries_that_attend_in_parts_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part as a sample of its own: the backward pass of few keys has a program per key tile, head and sample."""
    monkeypatch.setattr("headway.models.attention.choose", lambda *_, **__: "cudnn")
    monkeypatch.setattr("headway.models.attention.LEAST_QUERIES", 2)
    monkeypatch.setattr("headway.models.attention.PROGRAMS", 18)
    assert query_parts(2, 12, 3, keys=5) == 3
    q, k, v, grad = samples(12, 5, 16)
    want = gradients(reference, *(x.double() for x in (q, k, v, grad)))
    for ours, truth in zip(gradients(attend_fully, q, k, v, grad), want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


def test_parts_are_equal_and_run_at_once() -> None:
    assert query_parts(1, 17160, 12, keys=512) == 2  # 4 key tiles, 12 heads: 96 programs
    assert query_parts(1, 17160, 12, keys=17160) == 1
    assert query_parts(1, 17161, 12, keys=77) == 1  # 17161 = 131 * 131
    assert query_parts(1, 1000, 12, keys=77) == 1
    assert query_parts(1, 4096, 12, keys=77) == 4  # as many as leave 1,024 queries


@pytest.mark.gpu
def test_parts_on_a_gpu_equal_float64() -> None:
    q, k, v, grad = samples(4096, 77, 64, "cuda", torch.bfloat16)
    assert query_parts(*q.shape[:3], keys=77) == 4
    want = gradients(lambda *x: nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in x)).transpose(1, 2), *(x.double() for x in (q, k, v, grad)))  # fmt: skip
    for ours, truth in zip(gradients(attend_fully, q, k, v, grad), want, strict=True):
        assert float((ours.double() - truth).abs().max() / truth.abs().max()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys", "head"), [(512, 512, 128), (1000, 300, 72), (300, 77, 64)])
def test_bits_repeat_on_a_gpu_and_equal_float64(queries: int, keys: int, head: int) -> None:
    assert repeatable_attention.works(head)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        q, k, v, grad = samples(queries, keys, head, "cuda", torch.bfloat16)
        first = gradients(repeatable_attention.attention, q, k, v, grad)
        for _ in range(4):
            again = gradients(repeatable_attention.attention, q, k, v, grad)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)
    want = gradients(lambda *x: nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2) for y in x)).transpose(1, 2), *(x.double() for x in (q, k, v, grad)))  # fmt: skip
    for ours, truth in zip(first, want, strict=True):
        assert float((ours.double() - truth).abs().max() / truth.abs().max()) < 0.02
