"""Random bits, rounding and eight-bit numbers, each against a plain copy of what the file says, in NumPy."""

import hashlib

import numpy as np
import pytest
import torch

from headway.state.box import Box
from headway.train.optim.eightbit import BLOCK, codebook, decode, encode
from headway.train.optim.rounding import RoundingBits, to_bfloat16

CPU = torch.device("cpu")


def mix(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def bits_by_hand(seed: int, step: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    k = np.frombuffer(hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest(), dtype="<u4")
    row, column = np.divmod(np.arange(np.prod(shape)), shape[-1])
    rows = mix(mix(row.astype(np.uint32) ^ k[0]) ^ k[1])
    return mix(rows + mix(mix(column.astype(np.uint32) ^ k[2]) ^ k[3])).reshape(shape)


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 1), (3, 1, 2, 5)])
def test_bits_are_the_formulas(shape: tuple[int, ...]) -> None:
    word = bits_by_hand(3, 17, "blocks.0.w", shape)
    halves = {"weight": word, "momentum": word, "exp_avg": word >> 16, "exp_avg_sq": word * np.uint32(0x9E3779B1) >> 16}
    for kept, wanted in halves.items():
        bits = RoundingBits(3, 17).bits("blocks.0.w", Box((0,) * len(shape), shape), shape, CPU, kept)
        assert np.array_equal(bits.numpy() & 0xFFFF, wanted & 0xFFFF)


@pytest.mark.parametrize("seed", range(20))
def test_the_bits_of_a_part_are_that_part_of_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 9, size=rng.integers(1, 4)).tolist())
    start = tuple(int(rng.integers(0, size)) for size in shape)
    part = Box(start, tuple(int(rng.integers(0, size - at + 1)) for size, at in zip(shape, start, strict=True)))
    bits = RoundingBits(seed, 2).bits("w", part, shape, CPU).numpy().view(np.uint32)
    assert np.array_equal(bits, bits_by_hand(seed, 2, "w", shape)[part.slices((0,) * len(shape))])


def test_bits_look_random_and_differ_by_seed_step_name_and_what_is_kept() -> None:
    shape = (1000, 1000)
    draws = [RoundingBits(*key).bits(name, Box((0, 0), shape), shape, CPU, kept).numpy().view(np.uint32)
             for key, name, kept in (((0, 1), "w", "weight"), ((1, 1), "w", "weight"), ((0, 2), "w", "weight"),
                                     ((0, 1), "v", "weight"), ((0, 1), "w", "exp_avg"),
                                     ((0, 1), "w", "exp_avg_sq"))]  # fmt: skip
    for i, drawn in enumerate(draws):
        for bit in range(16):  # five standard errors of a fair coin are 0.0025
            assert abs(((drawn >> np.uint32(bit)) & np.uint32(1)).mean() - 0.5) < 0.0025
        low = (drawn & 0xFFFF).astype(np.float64)
        for other in (np.roll(low, 1, axis=0), np.roll(low, 1, axis=1), *(d & 0xFFFF for d in draws[:i])):
            assert abs(np.corrcoef(low.ravel(), other.ravel())[0, 1]) < 0.005
        counts = np.bincount((drawn & 0xFF).ravel(), minlength=256)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 370  # chi square of 255: once in a million


def test_rounding_goes_to_a_neighbour_and_is_unbiased() -> None:
    values = torch.tensor([1.0, 1.001, -1.003, 3.14159, -1e-20, 1e30, 0.0, 65504.3, 1e-39]).repeat(20000, 1)
    bits = RoundingBits(0, 1).bits("w", Box((0, 0), tuple(values.shape)), tuple(values.shape), CPU)
    rounded = to_bfloat16(values, bits).double()
    below = (values.view(torch.int32) & -0x10000).view(torch.float32).double()  # towards zero
    above = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    assert bool(((rounded == below) | (rounded == above)).all())
    exact = values[0] == values[0].bfloat16()
    assert torch.equal(rounded[:, exact], values[:, exact].double())
    width = (above - below).abs()[0]
    off = (rounded.mean(dim=0) - values[0].double()).abs() / width
    assert float(off.max()) < 5 * 0.5 / 20000**0.5  # five standard errors of the fairest coin


def test_what_is_no_number_stays_so() -> None:
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])
    odd = torch.cat([odd, torch.tensor([-1, 0x7F800001], dtype=torch.int32).view(torch.float32)])  # NaNs of all kinds
    rounded = to_bfloat16(odd, torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert rounded.isnan().tolist() == [True, False, False, True, True]
    assert rounded[1:3].tolist() == [torch.inf, -torch.inf]


# -- eight bits


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_are_the_papers(signed: bool) -> None:
    """256 of them; zero, one, and in each of seven powers of ten the middles of twice as many parts as in the last."""
    numbers = codebook(signed, CPU).double().numpy()
    assert len(numbers) == 256 == len(set(numbers.tolist()))
    assert numbers.max() == 1.0
    assert 0.0 in numbers
    positive = numbers[(numbers > 0) & (numbers < 1)]
    counts = [((positive > 10.0**-k / 10) & (positive < 10.0**-k)).sum() for k in range(7)]
    assert counts == [2 ** (6 - k) * (1 if signed else 2) for k in range(7)]
    negative = -numbers[numbers < 0][::-1]
    assert np.allclose(negative, positive if signed else [], rtol=1e-7)
    edges = np.linspace(0.1, 1.0, counts[0] + 1)
    assert np.allclose(positive[-counts[0] :], (edges[1:] + edges[:-1]) / 2, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (4, 256), (5, 300), (2, 3, 513)])
def test_codes_are_the_nearest_numbers_of_their_block(signed: bool, shape: tuple[int, ...]) -> None:
    """By trying all 256 for each element."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 3, shape)
    value = (value if signed else np.abs(value)).astype(np.float32)
    value.reshape(-1)[3::11] = 0.0
    codes, scales = encode(torch.from_numpy(value), signed)
    numbers = codebook(signed, CPU).double().numpy()
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // BLOCK))
    for row, got, scale in zip(
        value.reshape(-1, shape[-1]), codes.reshape(-1, shape[-1]), scales.reshape(-1, scales.shape[-1]), strict=True
    ):
        for block, first in enumerate(range(0, shape[-1], BLOCK)):
            part = row[first : first + BLOCK].astype(np.float64)
            assert float(scale[block]) == np.abs(part).max()
            distances = np.abs(part[:, None] / np.abs(part).max() - numbers)
            chosen = distances[np.arange(len(part)), got[first : first + BLOCK].numpy()]
            assert np.allclose(chosen, distances.min(axis=1), rtol=0, atol=1e-7)
    back = decode(codes, scales, signed)
    again, scales_again = encode(back, signed)
    biggest_kept = torch.equal(scales, scales_again)
    assert not biggest_kept or torch.equal(decode(again, scales_again, signed), back)


def test_a_block_of_zeros_is_zeros() -> None:
    for signed in (True, False):
        codes, scales = encode(torch.zeros(2, 300), signed)
        assert torch.equal(decode(codes, scales, signed), torch.zeros(2, 300))


def test_non_finite_gradient_propagates() -> None:
    value = torch.ones(1, 300)
    value[0, 299] = torch.nan
    assert decode(*encode(value, True), True).isnan()[0].tolist() == [False] * 256 + [True] * 44
