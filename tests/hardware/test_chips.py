"""Chips by the names drivers report, and figures against each other and against arithmetic on the silicon."""

import pytest

from headway.hardware import CHIPS, find_chip


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        # other silicon, or a part of it: no peak is better than a wrong one
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA H800", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-32GB", None),
        ("Neoverse-N1", None),
        ("", None),
    ],
)
def test_reported_names(reported: str, name: str | None) -> None:
    chip = find_chip(reported)
    assert (chip.name if chip else None) == name


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_typed_names(chip) -> None:
    assert find_chip(chip.name) is chip
    assert find_chip(f" {chip.name.upper()} ") is chip


@pytest.mark.parametrize(
    ("name", "tensor_cores", "products_a_clock", "boost_ghz"),
    [
        ("a100", 432, 256, 1.410),
        ("h100", 528, 512, 1.830),
        ("h200", 528, 512, 1.830),
        ("h100-pcie", 456, 512, 1.620),
        ("l40s", 568, 128, 2.520),
        ("rtx4090", 512, 64, 2.520),
    ],
)
def test_dense_bfloat16_follows_from_the_silicon(
    name: str, tensor_cores: int, products_a_clock: int, boost_ghz: float
) -> None:
    """Cores x multiply-adds a clock x 2 x clock is the dense peak; the sparse one would be twice that."""
    chip = find_chip(name)
    assert chip is not None
    dense = tensor_cores * products_a_clock * 2 * boost_ghz * 1e9
    assert chip.peaks["bfloat16"] == pytest.approx(dense, rel=0.015)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_figures_are_consistent(chip) -> None:
    assert chip.peaks["float16"] == chip.peaks["bfloat16"] > chip.peaks["float32"]
    if "float8" in chip.peaks:
        assert chip.peaks["float8"] == pytest.approx(2 * chip.peaks["bfloat16"], rel=0.02)
    assert 20 * 2**30 <= chip.memory_bytes <= 200 * 2**30
    assert 0.5e12 < chip.bandwidth_bytes_s < 10e12
    assert chip.source.startswith("NVIDIA")


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        CHIPS[0].peaks["bfloat16"] = 0.0  # type: ignore[index]
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
