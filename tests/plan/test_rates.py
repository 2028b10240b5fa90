"""The kernel model against what was measured on an H200, and against published figures."""

import math
import statistics

import pytest

from headway.hardware import find_ceilings, known_chip
from headway.plan.operations import Operation, gemm
from headway.plan.rates import LimitRates, MeasuredRates, ModelRates, generation, power_share

H200 = known_chip("h200")
CEILINGS = find_ceilings("h200")
assert CEILINGS is not None


@pytest.mark.parametrize(("precision", "name", "most"), [("bf16", "bfloat16", 0.06), ("fp8", "float8", 0.09)])
def test_tile_model_matches_measured_gemms(precision: str, name: str, most: float) -> None:
    """Over every measured GEMM with sides of at least 1024: a median error of a few percent."""
    grid = next(gemm for gemm in CEILINGS.gemm if gemm.precision == name)
    sizes = [(m, n, k) for m in grid.m for n in grid.n for k in grid.k]
    rates, errors = ModelRates(H200), []
    for (m, n, k), microseconds in zip(sizes, grid.microseconds, strict=True):
        if min(m, n, k) >= 1024:
            predicted = rates.gemm(gemm("x", "forward", m, n, k, 1, precision))
            errors.append(abs(math.log(predicted / (microseconds / 1e6))))
    assert len(errors) > 500
    assert statistics.median(errors) < most


@pytest.mark.parametrize(
    ("chip", "kernel", "head_dim", "published"),
    [  # FlashAttention-2 (2023), figures 4 and 7: causal, forward and backward, TFLOP/s at 512, 1k, 2k, 4k, 8k, 16k
        ("a100", "flash2", 128, (99, 133, 155, 173, 182, 189)),
        ("a100", "flash2", 64, (88, 119, 140, 156, 165, 171)),
        ("a100", "flash1", 128, (55, 62, 69, 76, 80, 83)),
        ("h100", "flash2", 128, (163, 221, 265, 294, 308, 328)),
        ("h100", "flash2", 64, (141, 192, 232, 257, 273, 284)),
    ],
)
def test_attention_curves_match_published_figures(
    chip: str, kernel: str, head_dim: int, published: tuple[int, ...]
) -> None:
    rates = ModelRates(known_chip(chip))
    for seq, speed in zip((512, 1024, 2048, 4096, 8192, 16384), published, strict=True):
        flops = 4.0 * 16384 * seq * 2048 / 2
        parts = (
            Operation("attention.core", "attention", "forward", flops, seq=seq, head_dim=head_dim),
            Operation("attention.core", "attention", "input_grad", 2 * flops, seq=seq, head_dim=head_dim),
        )
        seconds = sum(rates.attention(part, kernel) for part in parts)
        assert 3.5 * flops / seconds / 1e12 == pytest.approx(speed, rel=0.12 if kernel == "flash1" else 0.08)


@pytest.mark.parametrize(
    ("chip", "precision", "best"),
    [  # maximum achievable matmul FLOP/s, stas00/ml-engineering (2026)
        ("a100", "bf16", 271.2e12),
        ("h100", "bf16", 794.5e12),
        ("b200", "bf16", 1745e12),
        ("b200", "fp8", 3432.5e12),
    ],
)
def test_best_gemm_matches_published_rates(chip: str, precision: str, best: float) -> None:
    rates = ModelRates(known_chip(chip))
    operation = gemm("x", "forward", 8192, 8192, 8192, 1, precision)
    assert operation.flops / rates.gemm(operation) == pytest.approx(best, rel=0.08)


@pytest.mark.parametrize("size", [(128, 4096, 4096), (4096, 11008, 4096), (16384, 16384, 1024)])
def test_no_rate_beats_the_limit(size: tuple[int, int, int]) -> None:
    operation = gemm("x", "forward", *size, 1, "bf16")
    limit = LimitRates(H200).gemm(operation)
    assert limit <= MeasuredRates(H200, CEILINGS).gemm(operation)
    assert limit <= ModelRates(H200).gemm(operation)


def test_an_extra_wave_costs_its_time() -> None:
    """Eleven by twelve tiles fill all 132 processors once; a row more needs a second wave, or smaller tiles."""
    assert generation(H200).processors == 132
    full, more = (
        ModelRates(H200).gemm(gemm("x", "forward", m, 12 * 256, 1024, 1, "bf16")) for m in (11 * 128, 11 * 128 + 1)
    )
    assert more / full > 1.3


def test_memory_bound_kernels_reach_the_measured_bandwidth() -> None:
    size = 2**31
    predicted = ModelRates(H200).memory(Operation("copy", "memory", "forward", bytes=size))
    assert size / predicted == pytest.approx(CEILINGS.memory_bytes_s(size), rel=0.05)


def test_power_limit_slows_gemms_but_not_memory() -> None:
    chip = known_chip("h100")
    assert power_share(chip, 700, 0, 0, 1, 1.45) == 1.0
    full, capped = (power_share(chip, watts, 0.8, 0.1, 0.1, 1.45) for watts in (700, 500))
    assert 0.8 < full < 0.95
    assert capped == pytest.approx(full * math.sqrt(500 / 700))


def test_sustained_gemm_runs_at_the_measured_clock() -> None:
    """Back-to-back GEMMs: 663 of a burst's 797 TFLOP/s on an H200 at 692 W."""
    share = CEILINGS.sustained_share("bf16")
    assert power_share(H200, H200.power_w, 1, 0, 0, share**-2) == pytest.approx(share)
