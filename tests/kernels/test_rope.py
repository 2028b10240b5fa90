"""Rotary positions against products of complex float64 numbers, in Triton's interpreter; at large shapes on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from headway.kernels.rope import cut, reference, reference_one, rope, rope_one
from headway.models.rotary import rotary_table, rotate
from thinned import thinned

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to a result and, for those near zero, to 1. bfloat16's is twice what rounding takes, since the interpreter
cuts off instead."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {
    "one number each": (1, 1, 1, 1, 2, 1),
    "shared keys": (2, 5, 4, 1, 8, 4),
    "SmolLM2": (1, 3, 9, 3, 64, 32),
    "odd pairs": (2, 3, 3, 5, 14, 7),
    "a part turns": (2, 3, 5, 5, 20, 4),
    "an odd rest": (1, 2, 2, 1, 129, 50),
    "several programs a token": (1, 2, 41, 5, 256, 128),
}
"""B, L, N, K, H, R."""


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return numbers.to(dtype).requires_grad_()


def table_of(length: int, pairs: int, device: str = "cpu") -> Tensor:
    return rotary_table(torch.arange(5, 5 + length, device=device), 2 * pairs, 10_000)


def exact(x: Tensor, table: Tensor) -> Tensor:
    """From float64 numbers: the turn is a product with cos + i sin."""
    size = table.shape[-1]
    angle = torch.complex(table[0].double(), table[1].double()).unsqueeze(1)
    turned = torch.complex(x[..., :size], x[..., size : 2 * size]) * angle
    return torch.cat((turned.real, turned.imag, x[..., 2 * size :]), dim=-1)


def close(actual: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check(q: Tensor, k: Tensor, table: Tensor) -> None:
    """Both passes of a pair of tensors."""
    grads = tuple(drawn(x.shape, x.dtype, 7 + i, x.device.type).detach() for i, x in enumerate((q, k)))
    rotated = rope(q, k, table)
    leaves = [x.detach().double().requires_grad_() for x in (q, k)]
    truth = [exact(x, table) for x in leaves]
    for actual, right in zip(rotated, truth, strict=True):
        assert actual.is_contiguous()
        close(actual, right, q.dtype)
    gradients = torch.autograd.grad(rotated, (q, k), grads)
    for gradient, right in zip(gradients, torch.autograd.grad(truth, leaves, [x.double() for x in grads]), strict=True):
        close(gradient, right, q.dtype)


@pytest.mark.parametrize(("name", "dtype"), thinned(SHAPES, DTYPES), ids=str)
def test_both_passes(name: str, dtype: torch.dtype) -> None:
    batch, length, queries, keys, size, pairs = SHAPES[name]
    q, k = drawn((batch, length, queries, size), dtype, 0), drawn((batch, length, keys, size), dtype, 1)
    check(q, k, table_of(length, pairs))


def test_views_of_one_projection() -> None:
    whole = drawn((2, 3, 5 * 16 + 8), torch.float32, 0).detach()
    q = whole[..., : 3 * 16].unflatten(-1, (3, 16)).requires_grad_()
    k = whole[..., 3 * 16 : 5 * 16].unflatten(-1, (2, 16)).requires_grad_()
    check(q, k, table_of(3, 8))


def test_heads_before_tokens_and_gaps_within_heads() -> None:
    q = drawn((2, 4, 3, 16), torch.float32, 0).detach().transpose(1, 2).requires_grad_()
    k = drawn((2, 3, 2, 32), torch.float32, 1).detach()[..., ::2].requires_grad_()
    check(q, k, table_of(3, 8))
    # A sum's gradient is one number, expanded.
    (gradient,) = torch.autograd.grad(rope_one(q, table_of(3, 8)).sum(), q)
    close(gradient, torch.autograd.grad(exact(q.double(), table_of(3, 8)).sum(), q)[0].double(), torch.float32)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    q, k = drawn(shape, torch.float32, 0), drawn(shape, torch.float32, 1)
    rotated = rope(q, k, table_of(shape[1], 4))
    assert [x.shape for x in rotated] == [q.shape, k.shape]
    assert torch.autograd.grad(rotated[0].sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_are_what_models_do(dtype: torch.dtype) -> None:
    for size, pairs in [(16, 8), (20, 4)]:
        x, table = drawn((2, 3, 4, size), dtype, 0).detach(), table_of(3, pairs)
        assert torch.equal(reference_one(x, table), rotate(x, table))
        assert all(torch.equal(rotated, rotate(x, table)) for rotated in reference(x, x, table))


def test_one_alone_is_the_same() -> None:
    q, k, table = drawn((2, 3, 5, 20), torch.float32, 0), drawn((2, 3, 2, 20), torch.float32, 1), table_of(3, 4)
    for single, both in zip((rope_one(q, table), rope_one(k, table)), rope(q, k, table), strict=True):
        assert torch.equal(single, both)
    (gradient,) = torch.autograd.grad(rope_one(q, table), q, torch.ones_like(q))
    assert torch.equal(gradient, torch.autograd.grad(rope(q, k, table)[0], q, torch.ones_like(q))[0])


def test_turning_back() -> None:
    x, table = drawn((1, 4, 2, 32), torch.float32, 0), table_of(4, 16)
    turned = rope_one(x, table)
    (back,) = torch.autograd.grad(turned, x, turned.detach())
    torch.testing.assert_close(back, x.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_scores_depend_on_distance_alone() -> None:
    q, k = drawn((1, 1, 1, 32), torch.float32, 0).detach(), drawn((1, 1, 1, 32), torch.float32, 1).detach()
    q_turned, k_turned = rope(q.expand(1, 9, 1, 32), k.expand(1, 9, 1, 32), table_of(9, 16))
    scores = q_turned[0, :, 0] @ k_turned[0, :, 0].T
    for distance in range(-8, 9):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=2e-5)


def test_unsupported_inputs_are_refused() -> None:
    q, table = torch.zeros(2, 3, 4, 8), table_of(3, 4)
    wrong = {
        "in float32, float16 or bfloat16": (q.double(), q, table),
        "expected heads": (q, q[0], table),
        "differ in": (q, q.half(), table),
        "more than their heads": (q, q[..., :6], table_of(3, 3)),
        "3 positions": (q, q, table_of(4, 4)),
        "not torch.float16": (q, q, table.half()),
        "cannot rotate": (q, q, table_of(3, 5)),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            rope(*arguments)


@pytest.mark.parametrize("size", [2, 64, 80, 128, 256])
def test_how_work_is_cut(size: int) -> None:
    for queries, keys in [(1, 1), (9, 3), (32, 8), (40, 40), (128, 8), (12, 0)]:
        share = cut(queries, keys, size)
        assert share.queries * share.shares >= queries
        assert share.keys * share.shares >= keys
        assert share.warps in (1, 2, 4, 8)
        assert (share.queries + share.keys) * size <= 8192


OPERATORS = {
    "rope": lambda device: (*(drawn((2, 3, n, 8), torch.float32, n, device) for n in (4, 2)), table_of(3, 3, device)),
    "rope_one": lambda device: (drawn((2, 3, 4, 8), torch.float32, 0, device), table_of(3, 4, device)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound(name: str) -> None:
    # The interpreter needs numbers: what traces through it (aot_dispatch) is tested on a GPU.
    sound = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(getattr(torch.ops.headway, name).default, (*OPERATORS[name]("cpu"), False), test_utils=sound)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_sound_on_a_gpu(name: str) -> None:
    opcheck(getattr(torch.ops.headway, name).default, (*OPERATORS[name]("cuda"), False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 4096, 32, 8, 64, 32), (1, 8192, 32, 8, 128, 64), (2, 1000, 40, 40, 80, 10), (1, 500, 128, 8, 128, 64)]
)
def test_large_ones_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, length, queries, keys, size, pairs = shape
    whole = drawn((batch, length, (queries + 2 * keys) * size), dtype, 0, "cuda").detach()
    q, k, _ = whole.unflatten(-1, (-1, size)).split((queries, keys, keys), dim=2)
    check(q.requires_grad_(), k.requires_grad_(), table_of(length, pairs, "cuda"))


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    q, k, table = (*(drawn((2, 64, n, 64), torch.bfloat16, n, "cuda") for n in (4, 2)), table_of(64, 32, "cuda"))
    whole = torch.compile(lambda q, k: [2 * x for x in rope(q + 1, k, table)], fullgraph=True)
    compiled, plain = whole(q, k), [2 * x for x in rope(q + 1, k, table)]
    grads = [torch.ones_like(x) for x in plain]
    for actual, other in zip(
        (*compiled, *torch.autograd.grad(compiled, (q, k), grads)),
        (*plain, *torch.autograd.grad(plain, (q, k), grads)),
        strict=True,
    ):
        assert torch.equal(actual, other)
