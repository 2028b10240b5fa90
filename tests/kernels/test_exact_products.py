"""Exact mode's kernels for GPUs, in Triton's interpreter: rows have the same bits in any batch, in training and engine.

The interpreter multiplies by NumPy, whose sums of a tile do not depend on its other rows either; what is tried here is
which sums there are, and in which order. That a GPU's tiles agree, `test_exact_gpu.py` tries.
"""

import math

import pytest
import torch
from test_paged_attention import draw as draw_pages
from torch import Tensor

from headway.errors import ModelError
from headway.kernels import dispatch as table
from headway.kernels import exact_attention, exact_products, online_softmax, sequential_linear
from headway.kernels.paged_triton import PagedTiling, causal_attention, exact_tiling, triton_attention
from headway.kernels.rms_norm import rms_norm
from headway.kernels.rotary_store import HeadShape, rotate_and_store
from headway.kernels.sampling import draw, label_logprobs
from headway.kernels.sequential_linear import LinearTiling
from headway.models import empty_decoder
from headway.models.attention import attend_all, see
from headway.models.exact import make_exact
from headway.models.loss import token_logprobs
from headway.models.rotary import rotary_table, rotate
from headway.recipe.families import class_of

CPU = torch.device("cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the CPU count as a device of Triton's, which its interpreter makes it."""
    monkeypatch.setattr(table, "devices", ("cuda", "cpu"))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_products_have_the_same_bits_in_any_batch(dtype: torch.dtype, biased: bool) -> None:
    x, weight = noise(70, 96, dtype=dtype), noise(40, 96, seed=1, dtype=dtype)
    bias = noise(40, seed=2, dtype=dtype) if biased else None
    whole = exact_products.product(x, weight, bias)
    for rows in (1, 5, 17, 33):
        assert torch.equal(exact_products.product(x[3 : 3 + rows], weight, bias), whole[3 : 3 + rows])
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), wanted, rtol=2e-3, atol=2e-2 if dtype == torch.float16 else 1e-4)


def test_sums_in_another_order_have_other_bits() -> None:
    """The test above would notice: of a K in halves that are added at the end, as split-K products are."""
    x, weight = noise(16, 256), noise(32, 256, seed=1)
    tiling = LinearTiling(16, 16, 32, 4, 2)
    halves = [sequential_linear.linear(x[:, k].contiguous(), (weight[:, k].contiguous(),), tiling=tiling)
              for k in (slice(0, 128), slice(128, 256))]  # fmt: skip
    whole = sequential_linear.linear(x, (weight,), tiling=tiling)
    assert not torch.equal(halves[0] + halves[1], whole)
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-4, atol=1e-4)


# -- attention


LENGTHS = [70, 1, 64, 40]


def documents(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


@pytest.mark.parametrize("window", [None, 20])
def test_pages_have_the_bits_of_whole_documents(window: int | None) -> None:
    spans = [(37, 70), (1, 1), (1, 64), (5, 40)]
    q, keys, values, batch, whole = draw_pages(spans, (4, 2), 64, 16, torch.float16)
    plan, _ = exact_attention.plan_documents(documents(LENGTHS), 1, sum(LENGTHS), exact_tiling(2).queries, CPU)
    k, v = (torch.cat([pair[i] for pair in whole]) for i in (0, 1))
    starts = plan.starts_S1.tolist()
    all_q = noise(sum(LENGTHS), 4, 64, seed=9, dtype=torch.float16)
    rows = torch.cat([torch.arange(end - new, end) for (new, _), end in zip(spans, starts[1:], strict=True)])
    all_q[rows] = q
    trained, _ = causal_attention(all_q, k, v, plan.starts_S1, plan.programs, 0.125, window)
    got = triton_attention(q, keys, values, batch, 0.125, window, exact=True)
    assert torch.equal(got, trained[rows])
    others = triton_attention(q, keys, values, batch, 0.125, window, tiling=PagedTiling(64, 128, 32, 1, 4))
    assert not torch.equal(others, trained[rows])
    torch.testing.assert_close(others, trained[rows], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [None, 70])
def test_spans_in_programs_of_their_own_have_the_bits_of_whole_documents(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoded token's spans, joined by a second kernel or by one that has all of them; without spans bits differ."""
    monkeypatch.setattr(online_softmax, "EXACT_SPAN", 64)
    lengths = [130, 1, 64, 65]
    q, keys, values, batch, whole = draw_pages([(1, length) for length in lengths], (4, 2), 64, 16, torch.float16)
    plan, _ = exact_attention.plan_documents(documents(lengths), 1, sum(lengths), exact_tiling(2).queries, CPU)
    k, v = (torch.cat([pair[i] for pair in whole]) for i in (0, 1))
    all_q = noise(sum(lengths), 4, 64, seed=9, dtype=torch.float16)
    last = plan.starts_S1[1:].long() - 1
    all_q[last] = q
    trained, _ = causal_attention(all_q, k, v, plan.starts_S1, plan.programs, 0.125, window)
    for splits in (1, 4):
        tiling = PagedTiling(1, 16, 64, splits, 4)
        got = triton_attention(q, keys, values, batch, 0.125, window, tiling=tiling, exact=True)
        assert torch.equal(got, trained[last])
    monkeypatch.setattr(online_softmax, "EXACT_SPAN", 512)
    others = triton_attention(q, keys, values, batch, 0.125, window, exact=True)
    assert torch.equal(others[1:3], trained[last][1:3])
    torch.testing.assert_close(others, trained[last], rtol=1e-2, atol=1e-2)


def test_attention_of_documents_and_its_gradients_are_those_of_pytorch() -> None:
    numbers = documents([30, 50])
    plan, positions = exact_attention.plan_documents(numbers, 1, 80, exact_tiling(2).queries, CPU)
    assert positions.tolist() == [[*range(30), *range(50)]]
    assert plan.longest == 50
    q, k, v = (noise(1, 80, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2))
    mask = see(80, {None}, numbers, CPU, "masked")[None]

    def plain(*of: Tensor) -> Tensor:
        return attend_all(*of, mask)

    factors = noise(1, 80, 4, 64, seed=5)
    ways = [exact_attention.attention(q, k, v, plan, plain), plain(q, k, v)]
    gradients = [torch.autograd.grad(y, (q, k, v), factors) for y in ways]
    torch.testing.assert_close(ways[0], ways[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_rotation_into_pages_has_the_bits_of_modules() -> None:
    shape, tokens = HeadShape(2, 1, 64), 6
    q, k, v = (noise(tokens, heads * 64, seed=i) for i, heads in enumerate((2, 1, 1)))
    positions, norms = torch.tensor([3, 0, 9, 40, 7, 1]), (noise(64, seed=4), noise(64, seed=5))
    pages, slots = torch.zeros(2, 3, 4, 1, 64), torch.tensor([0, 5, 11, 2, 7, 3])
    every = rotary_table(torch.arange(41), 64, 1e4)
    got, _, _ = rotate_and_store(q, k, v, shape, every, positions, slots, pages[0], pages[1], norms, 1e-5)
    of_tokens = rotary_table(positions, 64, 1e4)
    # Rows with tables of their own, as packed documents have.
    trained = [
        rotate(rms_norm(x.view(2, 3, -1, 64), w, 1e-5), of_tokens.unflatten(1, (2, 3)), exact=True).flatten(0, 1)
        for x, w in zip((q, k), norms, strict=True)
    ]
    assert torch.equal(got, trained[0])
    assert torch.equal(pages[0].flatten(0, 1)[slots], trained[1])
    assert torch.equal(pages[1].flatten(0, 1)[slots], v.view(tokens, 1, 64))


# -- log-probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_labels_have_the_log_probabilities_that_were_sampled(temperature: float) -> None:
    rows, width = 5, 3000
    logits, temperatures = 3 * noise(rows, width), torch.full((rows, 2), temperature)
    tokens, logprobs = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    numbers = torch.arange(rows)
    draw(logits, width - 10, width, temperatures, numbers, numbers.int(), tokens, logprobs)
    assert torch.equal(label_logprobs(logits, tokens, temperature), logprobs)
    assert torch.equal(label_logprobs(logits[2:3], tokens[2:3], temperature), logprobs[2:3])
    true = (logits.double() / temperature).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainers_log_probabilities_are_those_of_exact_logits(temperature: float) -> None:
    x, weight = noise(20, 32), noise(100, 32, seed=1)
    labels = torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(2))
    labels[::4] = -100
    sampled = label_logprobs(exact_products.product(x[3:4], weight), labels[3:4], temperature)
    x.requires_grad_()
    trained = token_logprobs(x, weight, labels, temperature=temperature, exact=True)
    assert torch.equal(trained[3:4], sampled)
    plain = (x.double() @ weight.double().T / temperature).log_softmax(-1)
    wanted = plain.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).where(labels >= 0, 0.0)
    torch.testing.assert_close(trained.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (trained, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


# -- what is refused


def decoder_of(**values: object):
    sizes = {"vocab_size": 64, "layers": 1, "dim": 64, "heads": 1, "head_dim": 64, "hidden": 64, **values}
    return empty_decoder(class_of(sizes)(**sizes), "meta")


def test_a_gpu_takes_bfloat16_and_a_trainers_float32_weights() -> None:
    gpu = torch.device("cuda")
    make_exact(decoder_of().to(torch.bfloat16), gpu)
    trainer = decoder_of()
    make_exact(trainer, gpu, torch.bfloat16)
    assert trainer.layers[0].mlp_norm.exact
    with pytest.raises(ModelError, match="no kernels for float32 on cuda yet"):
        make_exact(decoder_of(), gpu)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": 96, "heads": 2, "head_dim": 48}, "takes heads of 64 or 128, and this model's are of 48"),
        ({"hidden": 72}, "inputs are a multiple of 16, and one is 64 x 72"),
    ],
)
def test_sizes_that_kernels_do_not_take_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_exact(decoder_of(**values), torch.device("cuda"), torch.bfloat16)


def test_a_library_that_adds_up_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The choice of rows, with a library and a verdict of the test's own."""
    x, weight = noise(2100, 16), noise(16, 16, seed=1)
    asked = []

    def result(value: float, x: Tensor, out: Tensor | None) -> Tensor:
        return torch.full((len(x), 16), value) if out is None else out.fill_(value)

    def library(x: Tensor, *_: object, out: Tensor | None = None) -> Tensor:
        asked.append(len(x))
        return result(math.pi, x, out)

    monkeypatch.setattr(exact_products, "_library", library)
    monkeypatch.setattr(exact_products, "sequential", lambda x, *_, out=None: result(0.0, x, out))
    for agrees, whole in ((True, 2048), (False, 0)):
        monkeypatch.setattr(exact_products, "library_agrees", lambda *_, agrees=agrees: agrees)
        got = exact_products.product(x, weight)
        assert (got == math.pi).all(dim=1).sum() == whole
        assert (got == 0).all(dim=1).sum() == 2100 - whole
    exact_products.product(x[:1000], weight)
    assert asked == [2048]
    exact_products._tell(16, 16, False, 2048)
    exact_products._tell(16, 16, False, 2048)
    assert caplog.text.count("in another order for 2048 rows") == 1
