"""Rows have the same bits in any batch; values and gradients are those of the plain operations."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from headway.kernels import batch_invariant
from headway.kernels import batch_invariant_attention as tiled
from headway.models.attention import attend_all, see
from thinned import examples


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows in batches of these sizes, over and over, each in memory of its own."""
    batches, low = [], 0
    while low < len(x):
        size = sizes[len(batches) % len(sizes)]
        batches.append(x[low : low + size].clone())
        low += size
    return batches


sizes = st.lists(st.integers(1, 40) | st.integers(100, 400), min_size=1, max_size=6)


@settings(max_examples=examples(15))
@given(sizes, st.integers(1, 300), st.integers(1, 200), st.booleans(), st.integers(0, 99))
def test_rows_of_products_do_not_depend_on_the_batch(sizes, inputs, outputs, biased, seed):
    x, weight = noise(450, inputs, seed=seed), noise(outputs, inputs, seed=seed + 1)
    bias = noise(outputs) if biased else None
    order = torch.randperm(450, generator=torch.Generator().manual_seed(seed))
    expected = batch_invariant.linear(x, weight, bias)
    got = torch.cat([batch_invariant.linear(rows, weight, bias) for rows in split(x[order], sizes)])
    assert torch.equal(got, expected[order])
    torch.testing.assert_close(expected, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(576, 1536), (3072, 1024), (512, 4096)])
def test_products_have_the_same_bits_with_any_number_of_threads(shape):
    outputs, inputs = shape
    x, weight = noise(450, inputs), noise(outputs, inputs)
    expected = batch_invariant.product(x, weight)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        several = torch.cat([batch_invariant.product(rows, weight) for rows in split(x, [1, 16, 40, 300])])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(several, expected)


ROW_BY_ROW = {
    "silu": batch_invariant.silu,
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:], None, 1e-5),
    "softmax": lambda x: x.softmax(dim=-1),
    "log_softmax": lambda x: x.log_softmax(dim=-1),
    "sum": lambda x: x.sum(dim=-1, keepdim=True),
    "exp": torch.exp,
    "cos": torch.cos,
}
"""What exact mode takes from PyTorch as it is, and SiLU."""


@pytest.mark.parametrize("name", ROW_BY_ROW)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_other_operations_do_not_depend_on_the_batch(name, threads):
    before, operation = torch.get_num_threads(), ROW_BY_ROW[name]
    try:
        torch.set_num_threads(threads)
        for width in (3, 8, 17, 64, 576, 5000):
            x = noise(100 if width < 1000 else 20, width, seed=width) * 3
            expected = operation(x)
            for batches in ([1], [2, 3, 16], [7, 33]):
                assert torch.equal(torch.cat([operation(rows) for rows in split(x, batches)]), expected), width
    finally:
        torch.set_num_threads(before)


def test_gradients_are_those_of_the_plain_operations():
    x, weight, bias = noise(2, 5, 6).double(), noise(7, 6).double(), noise(7).double()
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(batch_invariant.linear, inputs)
    assert torch.autograd.gradcheck(batch_invariant.silu, (x * 5,))
    far = torch.tensor([-200.0, -95.0, 0.0, 95.0], requires_grad=True)
    torch.testing.assert_close(batch_invariant.silu(far), functional.silu(far))
    assert torch.autograd.grad(batch_invariant.silu(far).sum(), far)[0].isfinite().all()


def test_a_place_that_rounds_otherwise_is_noticed(monkeypatch):
    assert batch_invariant.rows_are_independent(40, 33)
    real = batch_invariant._in_tiles

    def edgy(x_TD: Tensor, weight_OD: Tensor, size: int) -> Tensor:
        y = real(x_TD, weight_OD, size)
        y[size - 1 :: size] += 2.0**-20
        return y

    monkeypatch.setattr(batch_invariant, "_in_tiles", edgy)
    assert not batch_invariant.rows_are_independent(41, 33)


def test_wide_tiles_that_add_up_in_another_order_are_not_used(monkeypatch):
    x, weight, tiles = noise(600, 33), noise(43, 33), []
    real, expected = batch_invariant._in_tiles, batch_invariant.product(x, weight)

    def seen(x_TD: Tensor, weight_OD: Tensor, size: int) -> Tensor:
        tiles.append(size)
        return real(x_TD, weight_OD, size) + (2.0**-20 if size == batch_invariant.WIDE else 0)

    batch_invariant.wide_tiles_agree.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(batch_invariant, "_in_tiles", seen)
        assert torch.equal(batch_invariant.product(x, weight), expected)
        assert tiles[-1] == batch_invariant.ROWS
    batch_invariant.wide_tiles_agree.cache_clear()


# -- attention

HEADS = [(4, 4), (6, 2), (3, 1), (18, 1)]


def packed(lengths: list[int], heads: tuple[int, int], size: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and documents of a row."""
    total = sum(lengths)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    q, k, v = (noise(1, total, count, size, seed=i) for i, count in enumerate((heads[0], heads[1], heads[1])))
    return q, k, v, documents


def exact(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """With gradients by the plain kernel."""
    plan, _ = tiled.plan_documents(documents, len(q), q.shape[1], q.shape[2] // k.shape[2])
    return tiled.attention(q, k, v, plan, lambda *qkv: plain(*qkv, documents, window), window=window)


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    mask = see(q.shape[1], {window}, documents, q.device, "masked")[window]
    return attend_all(q, k, v, mask)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 20, 70])
def test_attention_is_that_of_the_plain_kernel_with_its_gradients(heads, window):
    *inputs, documents = packed([3, 130, 1, 66], heads)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    y, wanted = exact(*inputs, documents, window), plain(*inputs, documents, window)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    factors = noise(*y.shape, seed=9)
    ours, theirs = (torch.autograd.grad((each * factors).sum(), inputs) for each in (y, wanted))
    for gradient, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 20])
def test_a_document_has_the_same_bits_wherever_in_a_row(heads, window, monkeypatch):
    lengths = [70, 5, 129, 64, 1, 40]
    q, k, v, documents = packed(lengths, heads)
    together = exact(q, k, v, documents, window).split(lengths, dim=1)
    monkeypatch.setattr(tiled, "ELEMENTS", 2**12)  # other programs are computed together
    in_two_rows = exact(*(torch.cat((x, x.flip(1))) for x in (q, k, v)), torch.cat((documents, documents)), window)
    assert torch.equal(in_two_rows[:1], torch.cat(together, dim=1))
    for number, y in enumerate(together):
        here = documents[0] == number
        assert torch.equal(exact(q[:, here], k[:, here], v[:, here], None, window), y)


def test_other_tiles_of_keys_have_other_bits(monkeypatch):
    q, k, v, documents = packed([100, 28], (4, 2))
    y = exact(q, k, v, documents, None)
    monkeypatch.setattr(tiled, "KEYS", 32)
    others = exact(q, k, v, documents, None)
    assert not torch.equal(others, y)
    torch.testing.assert_close(others, y)


@pytest.mark.parametrize("window", [None, 5])
def test_keys_that_are_not_seen_weigh_exactly_nothing(window):
    q, k, v, documents = packed([40], (2, 1))
    expected = exact(q, k, v, documents, window)
    v[:, 20:] = 1e38  # of which any weight but 0 would show
    got = exact(q, k, v, documents, window)
    assert torch.equal(got[:, :20], expected[:, :20])


def test_scores_far_below_the_best_weigh_next_to_nothing():
    q, k, v, documents = packed([100], (2, 1))
    q = q * 100  # differences of scores beyond what an exponential of float32 can be
    torch.testing.assert_close(exact(q, k, v, documents, None), plain(q, k, v, documents, None), rtol=1e-4, atol=1e-4)


def test_self_tests_of_the_first_pass_are_no_products_that_recomputation_keeps() -> None:
    """It finds stored products by their order, and self-tests are not repeated."""
    weights = [noise(48, 40, seed=1).requires_grad_(), noise(40, 48, seed=2).requires_grad_()]
    x = noise(300, 40)

    def block(x: Tensor) -> Tensor:
        return batch_invariant.linear(torch.relu(batch_invariant.linear(x, weights[0])), weights[1])

    wanted = torch.autograd.grad(block(x).square().sum(), weights)
    batch_invariant.wide_tiles_agree.cache_clear()
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default, torch.ops.aten.mm.default])
    y = checkpoint(block, x, use_reentrant=False, context_fn=kept)
    for got, want in zip(torch.autograd.grad(y.square().sum(), weights), wanted, strict=True):
        assert torch.equal(got, want)
