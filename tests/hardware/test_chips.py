"""Chips by the names drivers report, and figures against each other and against arithmetic on the silicon."""

import pytest

from headway.errors import UsageError
from headway.hardware import CHIPS, find_chip, known_chip, precision


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
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        # other silicon, or a slice of it: better no peak than a wrong one
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
        ("AMD Instinct MI300A", None),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", None),
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
    """Cores x multiply-adds per clock x 2 x clock is the dense peak; the sparse one would be twice that."""
    chip = find_chip(name)
    assert chip is not None
    dense = tensor_cores * products_a_clock * 2 * boost_ghz * 1e9
    assert chip.peaks["bfloat16"] == pytest.approx(dense, rel=0.015)


@pytest.mark.parametrize(
    ("name", "bits", "gigabits_s_a_pin"),
    [("a100-40", 5120, 2.43), ("mi300x", 8192, 5.2), ("l40s", 384, 18), ("rtx4090", 384, 21)],
)
def test_memory_bandwidth_follows_from_the_bus(name: str, bits: int, gigabits_s_a_pin: float) -> None:
    chip = known_chip(name)
    assert chip.bandwidth_bytes_s == pytest.approx(bits * gigabits_s_a_pin * 1e9 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("name", "links", "gigabytes_s_a_link"),
    [("a100", 12, 25), ("h100", 18, 25), ("h200", 18, 25), ("b200", 18, 50), ("gb300", 18, 50), ("mi300x", 7, 64)],
)
def test_link_bandwidth_follows_from_the_links(name: str, links: int, gigabytes_s_a_link: float) -> None:
    """Per direction; data sheets print both directions together."""
    assert known_chip(name).links[0].bandwidth_bytes_s == links * gigabytes_s_a_link * 1e9


GPUS = [chip for chip in CHIPS if chip.name != "cpu"]


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_figures_are_consistent(chip) -> None:
    assert chip.peaks["float16"] == chip.peaks["bfloat16"] > chip.peaks["float32"]
    assert chip.peaks["tf32"] == pytest.approx(chip.peaks["bfloat16"] / 2, rel=0.02)
    if "float8" in chip.peaks:
        assert chip.peaks["float8"] == pytest.approx(2 * chip.peaks["bfloat16"], rel=0.02)
    if "nvfp4" in chip.peaks:
        assert chip.peaks["mxfp8"] == chip.peaks["float8"] <= chip.peaks["nvfp4"] / 2
    assert 20 * 2**30 <= chip.memory_bytes <= 288 * 2**30
    assert 0.5e12 < chip.bandwidth_bytes_s <= 8e12
    assert 200 < chip.power_w <= 1400
    assert [link.devices for link in chip.links] == sorted({link.devices for link in chip.links})
    assert chip.source.startswith(("NVIDIA", "AMD"))
    assert set(chip.notes) <= set(chip.__dataclass_fields__)
    assert chip.source_of("power_w") == chip.source


def test_precisions_by_any_name() -> None:
    h100 = known_chip("h100")
    assert h100.peak("bf16") == h100.peak("bfloat16") == h100.peaks["bfloat16"]
    assert (precision("fp8"), precision("FP4")) == ("float8", "nvfp4")
    with pytest.raises(UsageError, match="h100 does not support nvfp4") as caught:
        h100.peak("nvfp4")
    assert "float8" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="unknown precision 'int3'"):
        h100.peak("int3")


@pytest.mark.parametrize("typed", ["H100 80GB", "h100_80gb", "h100-sxm", "a100_40gb", "A100 80GB", "MI300", "4090"])
def test_other_names_people_type(typed: str) -> None:
    assert known_chip(typed).name in ("h100", "a100-40", "a100", "mi300x", "rtx4090")


def test_an_unknown_chip_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown chip 'h1000'") as caught:
        known_chip("h1000")
    assert "did you mean h100" in (caught.value.hint or "")


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        CHIPS[0].peaks["bfloat16"] = 0.0  # type: ignore[index]
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
