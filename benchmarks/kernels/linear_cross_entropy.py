"""The loss of a head: beside the bare products, which it cannot do without, and beside others."""

from collections.abc import Callable, Iterator

import torch
from case import Case
from torch import Tensor

from headway.kernels import linear_cross_entropy as ours

SHAPES = {"1B": (16384, 2048, 128256), "8B": (8192, 4096, 128256)}
"""Tokens, width, vocabulary."""


def cases() -> Iterator[Case]:
    """A loss with and without gradients, scores of tokens with gradients, and one chunk's rows alone."""
    for model, (tokens, width, vocabulary) in SHAPES.items():
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).mul_(width**-0.5).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), device="cuda")
        product = 2 * tokens * width * vocabulary
        for case in (_training, _evaluation, _scores):
            yield case(f"{model} {tokens} x {width} x {vocabulary}", product, x, weight, labels)
        yield _rows(vocabulary)


def _training(shape: str, product: int, x: Tensor, weight: Tensor, labels: Tensor) -> Case:
    factor = torch.tensor(1 / len(x), device="cuda")

    def way(loss: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(x, weight, labels), (x, weight), factor)

    ways = {
        "headway": way(ours.summed_cross_entropy),
        "eager": way(ours.reference_summed_cross_entropy),
        "compiled": way(torch.compile(ours.reference_summed_cross_entropy, dynamic=False)),
    }
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        ways["liger"] = way(lambda *of: liger(*of, reduction="sum"))
        ways["liger, float32 sums"] = way(lambda *of: liger(*of, reduction="sum", accum_dtype=torch.float32))
    except ImportError:
        pass
    ways["bare products"] = lambda: _products(x.detach(), weight.detach())
    return Case("linear_cross_entropy", f"{shape}, forward + backward", ways, flops=3 * product)


def _products(x: Tensor, weight: Tensor) -> None:
    """What any way has to do: the logits and both gradients, all tokens at once."""
    logits = x @ weight.T
    torch.mm(logits, weight)
    torch.mm(logits.T, x)


def _evaluation(shape: str, product: int, x: Tensor, weight: Tensor, labels: Tensor) -> Case:
    of = x.detach(), weight.detach(), labels
    compiled = torch.compile(ours.reference_summed_cross_entropy, dynamic=False)
    ways = {
        "headway": lambda: ours.summed_cross_entropy(*of),
        "eager": lambda: ours.reference_summed_cross_entropy(*of),
        "compiled": lambda: compiled(*of),
        "bare product": lambda: of[0] @ of[1].T,
    }
    return Case("linear_cross_entropy", f"{shape}, forward", ways, flops=product)


def _scores(shape: str, product: int, x: Tensor, weight: Tensor, labels: Tensor) -> Case:
    over = torch.randn(2, len(x), device="cuda")

    def way(scores: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(scores(x, weight, labels), (x, weight), tuple(over))

    ways = {
        "headway": way(ours.token_scores),
        "eager": way(ours.reference_token_scores),
        "compiled": way(torch.compile(ours.reference_token_scores, dynamic=False)),
    }
    return Case("token_scores", f"{shape}, forward + backward", ways, flops=3 * product)


def _rows(vocabulary: int) -> Case:
    """What is left beside the products: each logit read once and its slope written once, at least."""
    rows = ours.chunk_rows(2**20, vocabulary, 2)
    logits = ours.new_logits(rows, vocabulary, torch.empty(0, device="cuda", dtype=torch.bfloat16)).normal_()
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    ones = torch.ones(rows, device="cuda")

    def apart() -> None:
        spread, _, _ = ours.statistics(logits, labels)
        ours.slopes_(logits, labels, spread, level_T=ones, at_label_T=ones)

    def eager() -> None:
        slopes = torch.softmax(logits, dim=1)
        slopes.scatter_add_(1, labels.unsqueeze(1), -ones.to(slopes.dtype).unsqueeze(1))

    ways = {"headway": lambda: ours.loss_rows_(logits, labels), "headway, apart": apart, "eager": eager}
    return Case("cross_entropy rows", f"{rows} x {vocabulary}, slopes in place", ways, bytes=4 * rows * vocabulary)
