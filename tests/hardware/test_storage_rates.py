"""Storage benchmark: plausible rates, and no files left."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from headway.errors import UsageError
from headway.hardware.storage import StorageRates, file_system, measure_storage, uses

FAST = StorageRates("/disk", "xfs", 10**13, 2e9, 3e9, True, 5000.0, 20000.0, 1e5, 1e5, 1e5, True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[StorageRates, list[tuple[str, float]], Path]:
    folder, reports = tmp_path_factory.mktemp("disk"), list[tuple[str, float]]()
    return measure_storage(folder, 0.4, lambda stage, share: reports.append((stage, share))), reports, folder


def test_every_rate_is_measured_and_files_are_removed(
    measured: tuple[StorageRates, list[tuple[str, float]], Path],
) -> None:
    storage, _, folder = measured
    rates = [value for name, value in vars(storage).items() if name.endswith("_s")]
    assert len(rates) == 7
    assert min(rates) > 0
    assert storage.locks
    assert list(folder.iterdir()) == []


def test_progress_is_monotonic_and_completes(measured: tuple[StorageRates, list[tuple[str, float]], Path]) -> None:
    _, reports, _ = measured
    shares = [share for _, share in reports]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert list(dict.fromkeys(stage for stage, _ in reports)) == ["write", "read", "append", "metadata"]


@pytest.mark.parametrize("place", ["/", "/proc", "/dev/shm", "."])
def test_file_system_matches_df(place: str) -> None:
    done = subprocess.run(["df", "--output=fstype", place], capture_output=True, text=True, check=True)
    assert file_system(Path(place)) == done.stdout.split()[1]


def test_last_mount_at_a_path_wins(tmp_path: Path) -> None:
    lines = [
        "1 0 0:1 / / rw - ext4 a rw",
        "2 1 0:2 / /mnt/a\\040b rw - nfs4 b rw",
        "3 1 0:3 / /mnt/a\\040b rw - xfs c rw",
    ]
    (tmp_path / "mounts").write_text("\n".join(lines))
    assert file_system(Path("/mnt/a b/c"), tmp_path / "mounts") == "xfs"
    assert file_system(Path("/mnt/a bc"), tmp_path / "mounts") == "ext4"


@pytest.mark.parametrize(
    ("rates", "good"),
    [
        (FAST, ["checkpoints", "data", "runs, logs"]),
        (replace(FAST, file_system="tmpfs"), ["data"]),
        (replace(FAST, write_bytes_s=1e8), ["data", "runs, logs"]),
        (replace(FAST, locks=False), ["checkpoints", "data"]),
        (replace(FAST, flushes_s=5.0), ["checkpoints", "data"]),
        (replace(FAST, write_bytes_s=1e6, read_bytes_s=1e6, creates_s=3.0), []),
    ],
)
def test_suitable_uses_of_storage(rates: StorageRates, good: list[str]) -> None:
    assert [use.what for use in uses(rates) if use.good] == good
    assert all(use.why for use in uses(rates))


def test_a_checkpoint_takes_its_bytes_over_the_rate() -> None:
    assert "takes 49 s" in uses(FAST)[0].why  # 7e9 parameters of 14 bytes at 2 GB/s


def test_unmeasurable_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        measure_storage(tmp_path / "none")
    with pytest.raises(UsageError, match="too little to measure"):
        measure_storage("/proc")
