"""Clusters from the command line and from files, against levels by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.hardware import CHIPS, default_cluster, known_chip, load_cluster, parse_on

EXAMPLES = Path(__file__).resolve().parents[2] / "recipes" / "clusters"


@pytest.mark.parametrize(
    ("text", "chip", "per_node", "nodes"),
    [
        ("h100x8x16", "h100", 8, 16),
        (" H100x8x16 ", "h100", 8, 16),
        ("h100x4", "h100", 4, 1),
        ("h200", "h200", 1, 1),
        ("rtx4090", "rtx4090", 1, 1),
        ("rtx4090x8", "rtx4090", 8, 1),
        ("rtx4090x8x2", "rtx4090", 8, 2),
        ("mi300x", "mi300x", 1, 1),
        ("mi300xx8x2", "mi300x", 8, 2),
        ("mi300x8x2", "mi300x", 8, 2),
        ("h100-nvlx8x4", "h100-nvl", 8, 4),
        ("a100_80gbx8x4", "a100", 8, 4),
        ("gb200x4x18", "gb200", 4, 18),
        ("cpux1x2", "cpu", 1, 2),
    ],
)
def test_parse_on(text: str, chip: str, per_node: int, nodes: int) -> None:
    cluster = parse_on(text)
    assert (cluster.chip.name, cluster.per_node, cluster.nodes) == (chip, per_node, nodes)
    assert cluster.devices == per_node * nodes


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("h300x8x2", "unknown chip 'h300'", "h200"),
        ("nochip", "unknown chip 'nochip'", "lists all chips"),
        ("", "unknown chip", "headway hardware show lists all chips"),
        ("h100x8xmany", "expected CHIPxPERNODExNODES", "h100x8x16"),
        ("h100x0x2", "at least one node", "CHIPxPERNODExNODES"),
        ("h100x8x2x2", "unknown chip 'h100x8'", "did you mean h100"),
    ],
)
def test_invalid_on_is_rejected(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_on(text)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("h100x8x1", [("nvlink", 8, 450)]),
        ("h100x8x32", [("nvlink", 8, 450), ("rail", 256, 50)]),
        ("h100x8x48", [("nvlink", 8, 450), ("rail", 256, 50), ("spine", 384, 50)]),
        ("h100x4x2", [("nvlink", 4, 450), ("rail", 8, 50)]),
        ("h100x1x4", [("rail", 4, 50)]),
        ("h100", []),
        ("a100x8x40", [("nvlink", 8, 300), ("rail", 160, 25), ("spine", 320, 25)]),
        ("gb200x4x18", [("nvlink", 72, 900)]),
        ("gb300x4x36", [("nvlink", 72, 900), ("rail", 144, 100)]),
        ("gb200x4x4", [("nvlink", 16, 900)]),
        ("gb200x72x2", [("nvlink", 72, 900), ("rail", 144, 50)]),
        ("h100-nvlx8x2", [("nvlink", 2, 300), ("pcie", 8, 64), ("rail", 16, 6.25)]),
        ("l40sx4x1", [("pcie", 4, 32)]),
        ("mi300xx8x2", [("xgmi", 8, 448), ("rail", 16, 50)]),
    ],
)
def test_default_network_levels(text: str, levels: list[tuple[str, int, float]]) -> None:
    parsed = parse_on(text).levels
    assert [(level.name, level.devices, level.bandwidth_bytes_s / 1e9) for level in parsed] == levels
    assert all(level.source for level in parsed)


@given(st.sampled_from(CHIPS), st.sampled_from([1, 2, 4, 8]), st.integers(1, 600))
def test_levels_grow_until_they_connect_all(chip, per_node: int, nodes: int) -> None:
    cluster = default_cluster(chip, per_node, nodes)
    sizes = [level.devices for level in cluster.levels]
    assert sizes == sorted(set(sizes))
    assert cluster.devices == 1 or sizes[-1] == cluster.devices
    for level in cluster.levels:
        assert level.effective_bytes_s > 0 < level.latency_s
    rates = [level.effective_bytes_s for level in cluster.levels]
    assert rates == sorted(rates, reverse=True)


def crosses(extent: int, size: int, devices: int) -> bool:
    """Whether some group of neighbours crosses a boundary, by brute force."""
    groups = [range(first, first + extent) for first in range(0, devices - extent + 1, extent)]
    return any(group[0] // size != group[-1] // size for group in groups)


@given(st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 384]))
def test_level_of_a_group_is_the_lowest_that_contains_it(extent: int) -> None:
    cluster = parse_on("h100x8x48")
    used = cluster.level(extent)
    assert used is cluster.levels[-1] or not crosses(extent, used.devices, cluster.devices)
    for lower in cluster.levels[: cluster.levels.index(used)]:
        assert crosses(extent, lower.devices, cluster.devices)


def test_a_group_larger_than_the_cluster_is_rejected() -> None:
    with pytest.raises(UsageError, match="no group of 16"):
        parse_on("h100x8x1").level(16)
    assert parse_on("h100x6x1").level(6).name == "nvlink"


def test_examples_load() -> None:
    names = {file.name for file in EXAMPLES.glob("*.toml")}
    assert names == {"h100-rail.toml", "h100-96gb-500w.toml", "gb200-racks.toml"}
    rail = load_cluster(EXAMPLES / "h100-rail.toml")
    assert (rail.name, rail.devices, rail.price_per_gpu_hour) == ("h100-rail", 512, 2.5)
    assert [level.effective_bytes_s / 1e9 for level in rail.levels] == [450, 50, 25]
    assert rail.levels[-1].devices == 512
    capped = load_cluster(EXAMPLES / "h100-96gb-500w.toml")
    assert (capped.per_node, capped.power_w, capped.chip.memory_bytes) == (8, 500, 96 * 2**30)
    assert capped.chip.peaks == known_chip("h100").peaks
    assert capped.chip.source_of("memory_bytes").endswith("h100-96gb-500w.toml")
    assert load_cluster(EXAMPLES / "gb200-racks.toml").levels[0].devices == 72
    assert capped.as_dict()["chip"] == "h100"


TWO_LEVELS = 'chip="h100"\nnodes=4\n[[level]]\nname="nvlink"\ndevices=%s\ngigabytes_s=450\n[[level]]\nname="ib"\n%s\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("nodes = 2", "missing key chip", "h100"),
        ('chip = "h300"', "unknown chip 'h300'", "did you mean h200"),
        ('chip = "h100"\nnode = 2', 'unknown cluster key "node"', "nodes"),
        ('chip = "h100"\nprice = 2', 'unknown cluster key "price"', "price_per_gpu_hour"),
        ('chip = "h100"\nzzz = 2', 'unknown cluster key "zzz"', "keys: format, name, chip"),
        ('chip = "h100"\nnodes = 0', "nodes = 0: input should be greater than 0", ""),
        ('chip = "h100"\nnodes = 20000000000', "more than 10,000,000 devices", "20,000,000,000 nodes of 8"),
        ('chip = "h100"\nformat = 2', "format = 2", ""),
        (TWO_LEVELS % (8, "gigabit_s=400"), 'unknown level key "gigabit_s"', "gigabits_s"),
        (TWO_LEVELS % (8, "gigabits_s=400\ngigabytes_s=50"), "either gigabytes_s or gigabits_s", ""),
        (
            TWO_LEVELS % (8, "devices=8\ngigabits_s=400"),
            "level ib connects 8 devices, but nvlink below connects 8",
            "smallest",
        ),
        (
            TWO_LEVELS % (8, "devices=16\ngigabits_s=400"),
            "no level connects all 32 devices: ib connects 16",
            "last level",
        ),
        (TWO_LEVELS % (8, "gigabits_s=400\noversubscription=0.5"), "oversubscription = 0.5", ""),
        ("chip = ", "not valid TOML", ""),
    ],
)
def test_invalid_cluster_files_are_rejected(text: str, message: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_cluster(file)
    assert message in caught.value.message
    assert str(file) in caught.value.message
    assert hint in (caught.value.hint or "")


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read") as caught:
        load_cluster(tmp_path / "none.toml")
    assert "recipe cp clusters/" in (caught.value.hint or "")


def test_storage_is_read_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('chip = "h100"\nstorage_gigabytes_s = 20\nstorage_terabytes = 500\n')
    cluster = load_cluster(tmp_path / "c.toml")
    assert (cluster.storage_bytes_s, cluster.storage_bytes) == (20e9, 500e12)
