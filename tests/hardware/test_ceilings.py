"""Reading and interpolating measured ceilings: against laws with a known answer, and as properties."""

import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.hardware import CHIPS, Ceilings, find_ceilings, find_chip, read_ceilings, write_ceilings
from thinned import examples

PEAK = 1e15
SIZES = (64, 256, 1024, 4096)


def make_ceilings(time_us: Any, **more: Any) -> Ceilings:
    """Ceilings of a device whose GEMM times are given by a function."""
    times = [time_us(m, n, k) for m in SIZES for n in SIZES for k in SIZES]
    gemm = {"precision": "bfloat16", "m": SIZES, "n": SIZES, "k": SIZES, "microseconds": times}
    about = {"device": "a device", "chip": None, "kind": "cpu", "torch": "2", "timer": "host clock"}
    return Ceilings.model_validate({**about, "peaks": {"bfloat16": PEAK}, "gemm": [gemm], **more})


def power_law(m: int, n: int, k: int) -> float:
    """A device whose time follows powers of the sizes; efficiency stays below 1."""
    return 1.0 * m**0.7 * n**0.8 * k**0.9


@given(st.integers(64, 4096), st.integers(64, 4096), st.integers(64, 4096))
def test_power_laws_are_interpolated_exactly(m: int, n: int, k: int) -> None:
    ceilings = make_ceilings(power_law)
    assert ceilings.gemm_seconds(m, n, k, "bf16") == pytest.approx(power_law(m, n, k) / 1e6, rel=1e-9)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_extrapolation_beyond_the_grid(m: int, n: int, k: int) -> None:
    """Below the grid the time is constant, above it the efficiency; no GEMM beats the peak."""
    ceilings = make_ceilings(power_law)
    low = [max(size, SIZES[0]) for size in (m, n, k)]
    inside = [min(size, SIZES[-1]) for size in low]
    efficiency = 2.0 * math.prod(inside) / (power_law(*inside) / 1e6) / PEAK
    seconds = 2.0 * math.prod(low) / (efficiency * PEAK)
    assert ceilings.gemm_seconds(m, n, k, "bfloat16") == pytest.approx(seconds, rel=1e-9)
    assert 0 < ceilings.gemm_efficiency(m, n, k, "bfloat16") <= 1


def test_efficiency_is_capped_at_the_peak() -> None:
    assert make_ceilings(lambda m, n, k: 1e-9).gemm_efficiency(64, 64, 64, "bf16") == 1.0


def corners(axis: tuple[int, ...], size: int) -> set[int]:
    """The measured sizes at or next to a size."""
    below = max((at for at in axis if at <= size), default=axis[0])
    above = min((at for at in axis if at >= size), default=axis[-1])
    return {below, above}


@functools.cache
def shipped() -> Ceilings:
    ceilings = find_ceilings("h200")
    assert ceilings is not None
    return ceilings


@settings(max_examples=examples(300))
@given(st.data())
def test_shipped_gemms_interpolate_between_neighbours(data: st.DataObject) -> None:
    ceilings = shipped()
    grid = data.draw(st.sampled_from(ceilings.gemm))
    axes = (grid.m, grid.n, grid.k)
    sizes = [data.draw(st.integers(axis[0], axis[-1])) for axis in axes]
    around = [
        ceilings.gemm_efficiency(m, n, k, grid.precision)
        for m in corners(grid.m, sizes[0])
        for n in corners(grid.n, sizes[1])
        for k in corners(grid.k, sizes[2])
    ]
    efficiency = ceilings.gemm_efficiency(*sizes, grid.precision)
    assert min(around) * (1 - 1e-9) <= efficiency <= max(around) * (1 + 1e-9) <= 1 + 1e-9


@pytest.mark.parametrize("at", range(4))
def test_shipped_gemms_are_exact_at_measured_points(at: int) -> None:
    ceilings = shipped()
    grid = ceilings.gemm[at]
    points = [(m, n, k) for m in grid.m for n in grid.n for k in grid.k]
    for (m, n, k), microseconds in list(zip(points, grid.microseconds, strict=True))[::7]:
        assert ceilings.gemm_seconds(m, n, k, grid.precision) == pytest.approx(microseconds / 1e6, rel=1e-6)


def test_shipped_ceilings_are_complete_and_plausible() -> None:
    """Bounds from the data sheet and from other measurements of the chip, not from the file itself."""
    ceilings = shipped()
    chip = find_chip("h200")
    assert chip is not None
    assert (ceilings.chip, find_chip(ceilings.device)) == ("h200", chip)
    assert ceilings.skipped == {}
    assert set(ceilings.precisions()) == {"bfloat16", "float8", "tf32", "float32"}
    assert all(ceilings.peaks[name] == chip.peaks[name] for name in ceilings.precisions())
    assert 0.7 < ceilings.gemm_efficiency(8192, 8192, 8192, "bf16") < 0.9
    assert 0.7 < ceilings.sustained_share("bf16") < 0.95 < ceilings.sustained_share("fp32") <= 1
    assert 3.8e12 < ceilings.memory_bytes_s(2**31) < chip.bandwidth_bytes_s
    assert 50e9 < ceilings.copy_bytes_s(2**28, "to_device") < chip.host_bytes_s
    assert ceilings.copy_bytes_s(2**28, "to_host", pinned=False) < ceilings.copy_bytes_s(2**28, "to_host")
    for backward in (False, True):
        flash = ceilings.attention_flops(4096, 128, backward=backward, backend="flash")
        assert 0.15e15 < flash < ceilings.attention_flops(4096, 128, backward=backward, backend="cudnn") < 0.75e15
    assert 1e-4 < ceilings.layer_host_seconds("autocast") < 1e-2


def test_shipped_gemms_predict_layers_off_the_grid() -> None:
    """GEMMs of real layers, measured under steady load, a little slower than the grid's bursts."""
    ceilings = shipped()
    errors = [
        abs(ceilings.gemm_seconds(s.m, s.n, s.k, s.precision) / (s.microseconds / 1e6) - 1)
        for s in ceilings.gemm_shapes
    ]
    assert len(errors) > 300
    assert statistics.mean(errors) < 0.08
    assert max(errors) < 0.25


def test_shipped_files_are_small_and_undated() -> None:
    for chip in CHIPS:
        ceilings = find_ceilings(chip)
        assert (ceilings is None) == (chip.name != "h200")
    file = Path(__file__).resolve().parents[2] / "src/headway/hardware/measured/h200.json"
    assert file.stat().st_size < 200_000
    assert not {"date", "time", "hostname", "user"} & set(json.loads(file.read_bytes()))


def test_attention_between_head_sizes_and_lengths() -> None:
    curves = [
        {
            "backend": "default", "head_dim": h, "causal": True, "heads": 2, "kv_heads": 2, "tokens": 1024,
            "seq": [256, 1024], "forward_microseconds": [100.0 * h, 200.0 * h],
            "backward_microseconds": [400.0 * h, 800.0 * h],
        }
        for h in (64, 256)
    ]  # fmt: skip
    ceilings = make_ceilings(power_law, attention=curves)
    forward = 0.5 * 4 * 4 * 2 * 256 * 256 * 64 / (6400 / 1e6)  # four sequences of 256, two heads of 64, halved
    assert ceilings.attention_flops(256, 64) == pytest.approx(forward)
    assert ceilings.attention_flops(256, 64, backward=True) == pytest.approx(2 * forward / 4)
    assert ceilings.attention_flops(512, 64) == pytest.approx(forward * math.sqrt(2))  # half-way to twice the rate
    assert ceilings.attention_flops(256, 128) == pytest.approx(forward)  # both head sizes have the same rate
    assert ceilings.attention_flops(128, 64) == pytest.approx(forward / 2)
    assert ceilings.attention_flops(4096, 64) == ceilings.attention_flops(1024, 64)
    assert ceilings.attention_flops(256, 64, grouped=True) == pytest.approx(forward)
    with pytest.raises(UsageError, match="no attention through flash was measured"):
        ceilings.attention_flops(256, 64, backend="flash")


def test_curves_and_collectives() -> None:
    ring = {"operation": "all_reduce", "ranks": 4, "backend": "nccl", "bytes": [1000, 10000], "microseconds": [10, 20]}
    memory = {"operation": "copy", "bytes": [10**6], "microseconds": [1.0]}
    host = {"mode": "plain", "forward_microseconds": 500, "backward_microseconds": 900}
    ceilings = make_ceilings(power_law, collectives=[ring], memory=[memory], host=[host])
    assert ceilings.collective_seconds("all_reduce", 1000, 4) == pytest.approx(10e-6)
    assert ceilings.collective_seconds("all_reduce", 10, 4) == pytest.approx(10e-6)
    assert ceilings.collective_seconds("all_reduce", 10**6, 4) == pytest.approx(2e-3)
    assert ceilings.memory_bytes_s(10**9) == pytest.approx(1e12)
    assert ceilings.layer_host_seconds("plain", backward=True) == pytest.approx(9e-4)
    for ask in (
        lambda: ceilings.collective_seconds("all_reduce", 1000, 8),
        lambda: ceilings.memory_bytes_s(1, "add"),
        lambda: ceilings.copy_bytes_s(1, "to_host"),
        lambda: ceilings.layer_host_seconds("compiled"),
        lambda: ceilings.gemm_efficiency(1, 1, 1, "fp8"),
        lambda: ceilings.sustained_share("bf16"),
    ):
        with pytest.raises(UsageError, match="was measured on a device"):
            ask()


def test_a_file_survives_the_round_trip(tmp_path: Path) -> None:
    ceilings = make_ceilings(power_law)
    file = tmp_path / "ceilings.json"
    file.write_text("old")
    write_ceilings(file, ceilings)
    assert read_ceilings(file) == ceilings
    assert [path.name for path in tmp_path.iterdir()] == ["ceilings.json"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_ceilings(tmp_path / "none" / "ceilings.json", ceilings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"torch": None}, "torch"),
        ({"gemm": [{"precision": "tf32", "m": [1], "n": [1], "k": [1], "microseconds": [1, 2]}]}, "every point"),
        ({"gemm": [{"precision": "tf32", "m": [2, 1], "n": [1], "k": [1], "microseconds": [1, 2]}]}, "ascending"),
        ({"memory": [{"operation": "copy", "bytes": [1, 2], "microseconds": [1]}]}, "every size"),
        ({"memory": [{"operation": "copy", "bytes": [1], "microseconds": [0]}]}, "greater than 0"),
        ({"speed": 3}, "speed"),
    ],
)
def test_invalid_files_are_rejected_with_the_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "ceilings.json"
    file.write_text(json.dumps({**make_ceilings(power_law).model_dump(mode="json"), **change}))
    with pytest.raises(UsageError) as caught:
        read_ceilings(file)
    assert message in caught.value.message
    assert str(file) in caught.value.message


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_ceilings(tmp_path / "none.json")
