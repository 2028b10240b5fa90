"""The loss of a head without all logits in memory, against float64 autograd over all of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headway.kernels import linear_cross_entropy as module
from headway.kernels.inputs import IGNORED
from headway.kernels.linear_cross_entropy import (
    chunk_rows,
    reference_summed_cross_entropy,
    reference_token_scores,
    summed_cross_entropy,
    token_scores,
)
from headway.kernels.logits import new_logits, slopes_, statistics
from headway.models import loss as plain
from thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16 say so once

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest element; of float16 and bfloat16 this is the rounding of logits and slopes."""

SHAPES = [(1, 1, 1), (5, 7, 1), (3, 8, 7), (6, 16, 129), (9, 33, 1000), (2, 8, 5000)]
"""Tokens, width, vocabulary."""


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, weight and labels, every third of which is masked."""
    torch.manual_seed(tokens + vocabulary)
    x_TD = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, width) * 2 / width**0.5).to(dtype).requires_grad_()
    labels_T = torch.randint(vocabulary, (tokens,))
    labels_T[1::3] = IGNORED
    return x_TD, weight_VD, labels_T


def true_loss(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None, z_loss: float) -> Tensor:
    logits = x_TD @ weight_VD.T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    kept = labels_T != IGNORED
    loss = torch.nn.functional.cross_entropy(logits[kept], labels_T[kept], reduction="sum")
    return loss + z_loss * torch.logsumexp(logits[kept], dim=1).square().sum()


def true_scores(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = x_TD @ weight_VD.T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    kept = labels_T != IGNORED
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(labels_T.clamp(min=0)) * kept, distribution.entropy() * kept


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_near(actual: Tensor | None, wanted: Tensor | None, dtype: torch.dtype) -> None:
    assert actual is not None
    assert wanted is not None
    assert actual.shape == wanted.shape
    if wanted.numel():
        error = (actual.double() - wanted).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(wanted.abs().max().item(), 1e-2), error


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens a chunk."""
    monkeypatch.setattr(module, "CHUNK_TILE", 2)
    monkeypatch.setattr(module, "LOGITS_BYTES", 1)


@pytest.mark.parametrize(
    ("shape", "terms", "dtype"),
    thinned(SHAPES, [(None, 0.0), (None, 1e-2), (3.0, 1e-2)], [torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_loss_and_its_gradients_are_those_of_all_logits(
    shape: tuple[int, int, int], terms: tuple[float | None, float], dtype: torch.dtype
) -> None:
    softcap, z_loss = terms
    x, weight, labels = inputs(*shape, dtype)
    x64, weight64 = doubles(x, weight)
    loss = summed_cross_entropy(x, weight, labels, softcap, z_loss)
    wanted = true_loss(x64, weight64, labels, softcap, z_loss)
    assert loss.dtype == torch.float32
    assert_near(loss, wanted, dtype)
    (loss / 7).backward()
    (wanted / 7).backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert_near(x.grad, x64.grad, dtype)
    assert_near(weight.grad, weight64.grad, dtype)


@pytest.mark.parametrize(("shape", "softcap", "dtype"), thinned(SHAPES, [None, 3.0], [torch.float32, torch.float16]))
def test_log_probabilities_and_entropies_are_those_of_all_logits(
    shape: tuple[int, int, int], softcap: float | None, dtype: torch.dtype
) -> None:
    x, weight, labels = inputs(*shape, dtype)
    x64, weight64 = doubles(x, weight)
    scores, wanted = token_scores(x, weight, labels, softcap), true_scores(x64, weight64, labels, softcap)
    over_logprobs, over_entropy = torch.randn(2, shape[0])
    for score, true in zip(scores, wanted, strict=True):
        assert score.dtype == torch.float32
        assert_near(score, true, dtype)
    (scores[0] @ over_logprobs + scores[1] @ over_entropy).backward()
    (wanted[0] @ over_logprobs.double() + wanted[1] @ over_entropy.double()).backward()
    assert_near(x.grad, x64.grad, dtype)
    assert_near(weight.grad, weight64.grad, dtype)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (40001, torch.float32),
        pytest.param(70001, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_row_of_many_blocks(vocabulary: int, dtype: torch.dtype) -> None:
    x, weight, labels = inputs(3, 4, vocabulary, dtype)
    labels[-1] = vocabulary - 1
    x64, weight64 = doubles(x, weight)
    (summed_cross_entropy(x, weight, labels) + token_scores(x, weight, labels)[1].sum()).backward()
    (true_loss(x64, weight64, labels, None, 0.0) + true_scores(x64, weight64, labels, None)[1].sum()).backward()
    assert_near(x.grad, x64.grad, dtype)
    assert_near(weight.grad, weight64.grad, dtype)


@pytest.mark.parametrize("which", [0, 1])
def test_one_score_alone_has_gradients(which: int) -> None:
    x, weight, labels = inputs(6, 16, 129)
    x64, weight64 = doubles(x, weight)
    token_scores(x, weight, labels)[which].sum().backward()
    true_scores(x64, weight64, labels, None)[which].sum().backward()
    assert_near(x.grad, x64.grad, torch.float32)
    assert_near(weight.grad, weight64.grad, torch.float32)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunks_add_up(dtype: torch.dtype) -> None:
    x, weight, labels = inputs(7, 16, 129, dtype)
    assert chunk_rows(7, 129, 4) == 2
    for function, truth in (
        (lambda *of: summed_cross_entropy(*of, 3.0, 1e-2), lambda *of: true_loss(*of, 3.0, 1e-2)),
        (lambda *of: sum(token_scores(*of, 3.0)).sum(), lambda *of: sum(true_scores(*of, 3.0)).sum()),
    ):
        x.grad = weight.grad = None
        x64, weight64 = doubles(x, weight)
        loss, wanted = function(x, weight, labels), truth(x64, weight64, labels)
        loss.backward()
        wanted.backward()
        assert_near(loss, wanted, dtype)
        assert_near(x.grad, x64.grad, dtype)
        assert_near(weight.grad, weight64.grad, dtype)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("function", [summed_cross_entropy, lambda *of: sum(token_scores(*of)).sum()])
def test_only_what_is_wanted_gets_a_gradient(function: Callable[..., Tensor]) -> None:
    x, weight, labels = inputs(5, 16, 129)
    function(x, weight, labels).backward()
    dx, dweight = x.grad, weight.grad
    x.grad = weight.grad = None
    function(x, weight.detach(), labels).backward()
    assert torch.equal(x.grad, dx)
    assert weight.grad is None
    x.grad = None
    function(x.detach(), weight, labels).backward()
    assert torch.equal(weight.grad, dweight)
    assert x.grad is None


@pytest.mark.usefixtures("small_chunks")
def test_an_evaluation_counts_no_z_loss() -> None:
    x, weight, labels = inputs(5, 16, 129)
    with torch.no_grad():
        loss = summed_cross_entropy(x, weight, labels, 3.0, z_loss=1.0)
        scores = token_scores(x, weight, labels, 3.0)
    assert not loss.requires_grad
    assert_near(loss, true_loss(*doubles(x, weight), labels, 3.0, 0.0), torch.float32)
    for score, true in zip(scores, true_scores(*doubles(x, weight), labels, 3.0), strict=True):
        assert_near(score, true, torch.float32)


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_label_at_all(tokens: int) -> None:
    x, weight, _ = inputs(tokens, 16, 129)
    labels = torch.full((tokens,), IGNORED)
    loss = summed_cross_entropy(x, weight, labels, z_loss=1e-2)
    logprobs, entropy = token_scores(x, weight, labels)
    (loss + logprobs.sum() + entropy.sum()).backward()
    assert loss.item() == 0
    assert logprobs.tolist() == entropy.tolist() == [0.0] * tokens
    assert x.grad is not None
    assert not x.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_strided_inputs() -> None:
    x, weight, labels = inputs(6, 16, 129)
    wanted = summed_cross_entropy(x, weight, labels)
    wide = torch.stack((labels, labels), dim=1)[:, 0]
    strided = summed_cross_entropy(x.detach().T.contiguous().T, weight.detach().T.contiguous().T, wide)
    assert strided.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_it_is_what_the_plain_loss_computes() -> None:
    x, weight, labels = inputs(9, 33, 1000)
    for softcap, z_loss in ((None, 0.0), (3.0, 1e-2)):
        losses, gradients = [], []
        for function in (summed_cross_entropy, plain.summed_cross_entropy, reference_summed_cross_entropy):
            losses.append(function(x, weight, labels, softcap, z_loss))
            gradients.append(torch.autograd.grad(losses[-1], (x, weight)))
        for loss, (dx, dweight) in zip(losses[1:], gradients[1:], strict=True):
            assert_near(losses[0], loss.double(), torch.float32)
            assert_near(gradients[0][0], dx.double(), torch.float32)
            assert_near(gradients[0][1], dweight.double(), torch.float32)
    for score, wanted in zip(token_scores(x, weight, labels), reference_token_scores(x, weight, labels), strict=True):
        assert_near(score, wanted.double(), torch.float32)


def test_under_autocast_products_are_in_half_precision_and_gradients_in_full() -> None:
    x, weight, labels = inputs(6, 16, 129)
    x64, weight64 = doubles(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_cross_entropy(x, weight, labels)
        entropy = token_scores(x, weight, labels)[1]
    (loss + entropy.sum()).backward()
    (true_loss(x64, weight64, labels, None, 0.0) + true_scores(x64, weight64, labels, None)[1].sum()).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert_near(x.grad, x64.grad, torch.bfloat16)
    assert_near(weight.grad, weight64.grad, torch.bfloat16)


def test_a_constant_added_to_all_logits_changes_no_score_however_large() -> None:
    """The running maximum: exponentials of 10,000 overflow."""
    x, weight, labels = inputs(6, 16, 129)
    with_ones = torch.cat((x.detach(), torch.full((6, 1), 100.0)), dim=1)
    shifted = torch.cat((weight.detach(), torch.full((129, 1), 100.0)), dim=1)
    for score, wanted in zip(token_scores(with_ones, shifted, labels), token_scores(x, weight, labels), strict=True):
        torch.testing.assert_close(score, wanted.detach(), rtol=0, atol=5e-3)


def test_gradients_can_be_had_twice() -> None:
    """What forward kept is not scaled in place."""
    x, weight, labels = inputs(3, 8, 7)
    loss = summed_cross_entropy(x, weight, labels) * 3
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(gradient, other) for gradient, other in zip(first, second, strict=True))


@pytest.mark.parametrize("label", [-1, 129, pytest.param(2**40, marks=pytest.mark.slow)])
def test_a_label_that_is_none_shows(label: int) -> None:
    x, weight, labels = inputs(6, 16, 129)
    labels[0] = label
    assert summed_cross_entropy(x, weight, labels).isnan()
    assert summed_cross_entropy(x.detach(), weight.detach(), labels).isnan()
    assert token_scores(x, weight, labels)[0][0].isnan()


def test_shares_of_a_vocabulary_make_the_whole() -> None:
    x, weight, labels = (value.detach() for value in inputs(6, 16, 1000))
    shares, begin = [], 0
    for part in weight.split([300, 443, 257]):
        logits = torch.mm(x, part.T, out=new_logits(6, len(part), x))
        spread, chosen, entropy = statistics(logits, labels - begin, entropy=True)
        here = (labels >= begin) & (labels < begin + len(part))
        shares.append((spread, chosen.where(here, 0.0), entropy, logits, begin))
        begin += len(part)
    spreads = torch.stack([spread for spread, *_ in shares])
    whole = spreads.logsumexp(dim=0)
    means = spreads - torch.stack([entropy for _, _, entropy, *_ in shares])
    wanted, entropies = true_scores(*doubles(x, weight), labels, None)
    kept = labels != IGNORED
    assert_near((sum(chosen for _, chosen, *_ in shares) - whole) * kept, wanted, torch.float32)
    assert_near((whole - ((spreads - whole).exp() * means).sum(dim=0)) * kept, entropies, torch.float32)
    ones = kept.float()
    slopes = [
        slopes_(logits, labels - begin, whole, level_T=ones, at_label_T=ones) for _, _, _, logits, begin in shares
    ]
    truth = torch.softmax(x.double() @ weight.double().T, dim=1) - torch.eye(1000)[labels.clamp(min=0)]
    assert_near(torch.cat(slopes, dim=1), truth * kept.unsqueeze(1), torch.float32)


def test_chunks_are_few_equal_and_of_whole_tiles() -> None:
    assert chunk_rows(16384, 128256, 2) == 4096
    assert chunk_rows(8192, 128256, 2) == 4096
    assert chunk_rows(10000, 128256, 2) == 3456
    assert chunk_rows(100, 128256, 2) == 128
    assert chunk_rows(10**6, 10**9, 4) == 128
    assert chunk_rows(0, 128256, 2) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, w, y: (x.double(), w.double(), y), "float64"),
        (lambda x, w, y: (x.half(), w, y), "same"),
        (lambda x, w, y: (x[:, 1:], w, y), "expected x"),
        (lambda x, w, y: (x, w, y[1:]), "label per token"),
        (lambda x, w, y: (x, w, y.int()), "int64"),
        (lambda x, w, y: (x, w, y, 0.0), "soft cap"),
    ],
)
def test_unsupported_inputs_are_refused(change: Callable[..., tuple], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        summed_cross_entropy(*change(*inputs(3, 8, 7)))


def test_the_operations_are_what_they_say() -> None:
    x, weight, labels = inputs(3, 8, 7)
    x, weight = x.detach(), weight.detach()
    vector = torch.rand(3)
    checks = ("test_schema", "test_faketensor")
    operations = torch.ops.headway
    for want in (True, False):
        torch.library.opcheck(
            operations.summed_cross_entropy, (x, weight, labels, 3.0, 0.1, want, True), test_utils=checks
        )
        torch.library.opcheck(
            operations.token_scores_backward,
            (x, weight, labels, vector, vector, vector, None, None, want, True),
            test_utils=checks,
        )
    torch.library.opcheck(operations.token_scores, (x, weight, labels, None), test_utils=checks)
    torch.library.opcheck(
        operations.summed_cross_entropy_backward, (weight, torch.tensor(3.0), torch.float16), test_utils=checks
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_caller_gets_the_same() -> None:
    x, weight, labels = inputs(5, 16, 129)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropy = token_scores(x * 2, weight, labels)
        return summed_cross_entropy(x * 2, weight, labels, 3.0, 1e-2) / 3 + (logprobs + entropy).sum()

    compiled, wanted = torch.compile(step, backend="aot_eager", fullgraph=True)(x, weight), step(x, weight)
    assert torch.equal(compiled, wanted)
    gradients = zip(torch.autograd.grad(compiled, (x, weight)), torch.autograd.grad(wanted, (x, weight)), strict=True)
    assert all(torch.equal(gradient, other) for gradient, other in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary"),
    [(1000, 256, 50257), (4096, 2048, 128256), (300, 64, 7001), (300, 64, 211), (7, 16, 5)],
)
def test_large_shapes_on_a_gpu(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    labels[::5] = IGNORED
    full = [value.detach().float().requires_grad_() for value in (x, weight)]
    for softcap, z_loss in ((None, 1e-4), (30.0, 0.0)):
        loss = summed_cross_entropy(x, weight, labels, softcap, z_loss)
        wanted = reference_summed_cross_entropy(*full, labels, softcap, z_loss)
        assert_near(loss, wanted.double(), dtype)
        factor = torch.tensor(1 / tokens, device="cuda")
        for gradient, true in zip(
            torch.autograd.grad(loss, (x, weight), factor), torch.autograd.grad(wanted, full, factor), strict=True
        ):
            assert_near(gradient, true.double(), dtype)
        over = torch.randn(tokens, device="cuda")
        scores, truths = token_scores(x, weight, labels, softcap), reference_token_scores(*full, labels, softcap)
        for score, truth in zip(scores, truths, strict=True):
            assert_near(score, truth.double(), dtype)
        for gradient, true in zip(
            torch.autograd.grad((scores[0] * over + scores[1]).sum(), (x, weight)),
            torch.autograd.grad((truths[0] * over + truths[1]).sum(), full),
            strict=True,
        ):
            assert_near(gradient, true.double(), dtype)


@pytest.mark.gpu
def test_it_is_deterministic_on_a_gpu_and_holds_few_logits() -> None:
    tokens, width, vocabulary = 16384, 512, 128256
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).mul_(0.04).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")

    def once() -> tuple[Tensor, ...]:
        loss = summed_cross_entropy(x, weight, labels)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    first = once()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    second = once()
    assert all(torch.equal(value, other) for value, other in zip(first, second, strict=True))
    gradients_bytes = 6 * weight.numel() + 6 * x.numel()
    assert torch.cuda.max_memory_allocated() - before < module.LOGITS_BYTES + gradients_bytes + 2**26
