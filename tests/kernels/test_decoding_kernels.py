"""Kernels of decoding against PyTorch, in Triton's interpreter."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.inference.sampler import _inverse, mixed_seeds, uniform
from headway.kernels import decode_rows, matrix_vector, sequential_linear
from headway.kernels.decode_rows import GENERATED, LEFT, PAGES, POSITION, SOURCE, TOKEN
from headway.kernels.sampling import draw, label_logprobs

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_of_several_weights_lie_side_by_side(rows: int, biased: bool) -> None:
    x, weights = noise(rows, 32), [noise(outputs, 32, seed=outputs) for outputs in (96, 40, 16)]
    biases = [noise(len(w), seed=3) if biased else None for w in weights]
    truth = torch.cat([torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    torch.testing.assert_close(sequential_linear.linear(x, weights, biases), truth, **TOLERANCE)
    if rows == 1:
        torch.testing.assert_close(matrix_vector.linear(x, weights, biases), truth, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 20])
def test_gated_products_and_additions_to_the_stream(rows: int) -> None:
    x, gate, up, down = noise(rows, 48), noise(24, 48, seed=1), noise(24, 48, seed=2), noise(40, 48, seed=3)
    truth = swiglu(x @ gate.T, x @ up.T)
    torch.testing.assert_close(sequential_linear.gated_linear(x, gate, up), truth, **TOLERANCE)
    stream = noise(rows, 40, seed=4)
    added = sequential_linear.linear_into(stream.clone(), x, down)
    torch.testing.assert_close(added, stream + x @ down.T, **TOLERANCE)
    if rows == 1:
        torch.testing.assert_close(matrix_vector.gated_linear(x, gate, up), truth, **TOLERANCE)
        torch.testing.assert_close(matrix_vector.linear_into(stream.clone(), x, down), added, **TOLERANCE)


def test_a_norm_before_a_product() -> None:
    """Of a width that is no power of two."""
    x, norm, weight, up = noise(1, 40), noise(40, seed=1), noise(24, 40, seed=2), noise(24, 40, seed=3)
    normed = torch.nn.functional.rms_norm(x, (40,), norm, 1e-5)
    y = matrix_vector.linear(x, (weight,), norm=(norm, 1e-5))
    torch.testing.assert_close(y, normed @ weight.T, **TOLERANCE)
    y = matrix_vector.gated_linear(x, weight, up, norm=(norm, 1e-5))
    torch.testing.assert_close(y, swiglu(normed @ weight.T, normed @ up.T), **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 64, 65, 128, 256])
@pytest.mark.parametrize(
    ("outputs", "inputs", "products"),
    [(4096, 1024, 1), (3072, 1024, 2), (151936, 1024, 1), (14336, 4096, 2), (4096, 14336, 1), (1536, 576, 2)],
)
def test_tilings_fit_into_shared_memory(rows: int, outputs: int, inputs: int, products: int) -> None:
    tiling = sequential_linear.cut(rows, outputs, inputs, products)
    weights = products * tiling.columns
    assert 2 * tiling.depth * (tiling.stages * (tiling.rows + weights) + weights) <= 227 * 1024
    assert inputs % tiling.depth == 0
    assert tiling.stages >= 2


def drawn(logits: Tensor, vocabulary: int, temperatures: Tensor, seeds: list[int], places: list[int]) -> list[Tensor]:
    tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    mixed = torch.from_numpy(mixed_seeds(seeds).view(np.int64))
    positions = torch.tensor(places, dtype=torch.int32)
    draw(logits, vocabulary, logits.shape[1], temperatures, mixed, positions, tokens, logprobs)
    return [tokens, logprobs]


def test_tokens_are_where_the_cumulative_probability_passes_the_random_number() -> None:
    """Greedy rows and others, with tokens that only pad the vocabulary, in more than one chunk."""
    rows, vocabulary = 6, 2500
    logits = noise(rows, 2600) * 3
    temperatures = torch.tensor([[0.7, 0.7], [0.0, 1.0], [1.3, 1.0]] * 2)
    seeds, places = [2**62 + 11 * row for row in range(rows)], list(range(rows))
    tokens, logprobs = drawn(logits, vocabulary, temperatures, seeds, places)
    probabilities = (logits[:, :vocabulary] / temperatures[:, :1].where(temperatures[:, :1] > 0, 1.0)).softmax(-1)
    numbers = uniform(seeds, places, torch.device("cpu")).unsqueeze(1)
    sampled = _inverse(probabilities.double(), numbers.double()).squeeze(1)
    assert tokens.tolist() == torch.where(temperatures[:, 0] == 0, logits[:, :vocabulary].argmax(-1), sampled).tolist()
    truth = (logits.double() / temperatures[:, 1:]).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-5, atol=1e-5)


def test_a_row_is_sampled_alike_in_any_batch_and_has_the_trainers_bits() -> None:
    logits, temperatures = noise(3, 2100) * 4, torch.tensor([[0.8, 0.8]] * 3)
    tokens, logprobs = drawn(logits, 2100, temperatures, [5, 6, 7], [4, 9, 2])
    alone = drawn(logits[1:2], 2100, temperatures[1:2], [6], [9])
    assert (alone[0].item(), alone[1].item()) == (tokens[1].item(), logprobs[1].item())
    assert torch.equal(label_logprobs(logits, tokens, 0.8), logprobs)
    assert torch.equal(label_logprobs(logits, tokens, temperatures[:, 1]), logprobs)
    assert label_logprobs(logits, torch.tensor([-100, 2100, 0])).tolist()[:2] == [0, 0]


def test_no_logit_that_is_minus_infinity_is_drawn() -> None:
    logits = torch.full((2, 2100), float("-inf"))
    logits[0, 2060], logits[1, 3] = 1.0, -4.0
    tokens, logprobs = drawn(logits, 2100, torch.ones(2, 2), [1, 2], [0, 0])
    assert (tokens.tolist(), logprobs.tolist()) == ([2060, 3], [0, 0])


IR = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from headway.kernels.paged_triton import _paged_kernel as kernel
for rows, warps, page in ((16, 2, 64), (128, 8, 0)):
    constants = dict(SHARE=2, SHARE_2=2, HEAD=64, HEAD_2=64, PAGE=page, ROWS=rows, KEYS=64, SPLITS=1, LEAST=64,
        WINDOWED=False, CAPPED=False, SUNK=False, IEEE=False, ORDERED=True, SPAN=512, SUMS=page == 0,
        HEADS_FIRST=page > 0, EARLY=False)
    floats = {"parts_ptr", "peak_ptr", "total_ptr"}
    halves = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr"}
    types = {name: "constexpr" if name in constants else "*bf16" if name in halves else "*fp32" if name in floats
        else "fp32" if name in ("scale", "softcap") else "*i32" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names}
    source = ASTSource(kernel, types, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(made.asm["ttgir"])
"""


@pytest.mark.slow
def test_exact_attention_reduces_by_maxima_alone_on_a_gpu() -> None:
    """A sum's order would depend on how a tile is shared out among threads, which the interpreter does not show; sums
    of two numbers have one order."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", IR], env=environment, capture_output=True, text=True, check=True)
    bodies = re.findall(r'"tt\.reduce".*?tt\.reduce\.return', run.stdout, flags=re.DOTALL)
    shapes = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<([\dx]+)xf32', run.stdout, flags=re.DOTALL)
    assert len(bodies) == len(shapes) >= 4
    for body, shape in zip(bodies, shapes, strict=True):
        of_two = "axis = 1 " in body and shape.split("x")[1] == "2"
        assert of_two or "arith.maxnumf" in body or "arith.maximumf" in body


def test_a_row_without_passes_left_fills_up_the_batch() -> None:
    """Rows with 1, 3 and 0 passes left in pages of 4 tokens, of which 9 is the scratch page; the last pages are full
    after their sequences' last tokens."""
    rows = torch.zeros(3, PAGES + 2, dtype=torch.int32)
    rows[:, TOKEN] = torch.tensor([5, 6, 0])
    rows[:, SOURCE] = torch.tensor([2, -1, -1])
    rows[:, POSITION] = torch.tensor([7, 3, 0])
    rows[:, GENERATED] = torch.tensor([4, 1, 0])
    rows[:, LEFT] = torch.tensor([1, 3, 0])
    rows[:, PAGES:] = torch.tensor([[3, 1], [2, 4], [9, 0]])
    last = torch.tensor([10, 11, 12])
    tokens, positions, slots = (torch.zeros(3, dtype=torch.int64) for _ in range(3))
    lengths, draws = (torch.zeros(3, dtype=torch.int32) for _ in range(2))
    passes = []
    for _ in range(4):
        decode_rows.begin(rows, last, tokens, positions, slots, lengths, draws, page=4, scratch=9)
        passes.append([x.tolist() for x in (tokens, positions, slots, lengths, draws)])
    scratch = 9 * 4
    assert passes == [
        [[12, 6, 0], [7, 3, 0], [1 * 4 + 3, 2 * 4 + 3, scratch], [8, 4, 1], [4, 1, 0]],
        [[10, 11, 0], [0, 4, 0], [scratch, 4 * 4, scratch], [1, 5, 1], [5, 2, 0]],
        [[10, 11, 0], [0, 5, 0], [scratch, 4 * 4 + 1, scratch], [1, 6, 1], [5, 3, 0]],
        [[10, 11, 0], [0, 0, 0], [scratch, scratch, scratch], [1, 1, 1], [5, 4, 0]],
    ]
