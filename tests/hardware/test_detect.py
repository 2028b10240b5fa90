"""Detection with a stand-in for the driver's library, and CUDA_VISIBLE_DEVICES by CUDA's rules."""

import os
import sys
import types
from pathlib import Path

import psutil
import pytest

from headway.errors import RunError
from headway.hardware import Devices, detect, devices, this_cpu

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-bbbb-3"]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("1,1", []),
        ("GPU-bbbb-3,0", [2, 0]),
        ("GPU-b", [2]),
        ("GPU-aa", []),
        ("GPU-zz", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(setting: str | None, left: list[int]) -> None:
    assert detect.visible(setting, UUIDS) == [UUIDS[i] for i in left]


def test_mig_slices_stand_for_themselves() -> None:
    assert detect.visible("MIG-1234", UUIDS) == ["MIG-1234"]


def install(monkeypatch: pytest.MonkeyPatch, names: list[str], fails: bool = False) -> None:
    """Install a fake pynvml with these GPUs."""
    library = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def start() -> None:
        if fails:
            raise NVMLError("Driver Not Loaded")

    def by_uuid(uuid: bytes) -> int:
        return UUIDS.index(uuid.decode())

    library.NVMLError = NVMLError
    library.nvmlInit = start
    library.nvmlShutdown = lambda: None
    library.nvmlDeviceGetCount = lambda: len(names)
    library.nvmlDeviceGetHandleByIndex = lambda i: i
    library.nvmlDeviceGetHandleByUUID = by_uuid
    library.nvmlDeviceGetUUID = lambda handle: UUIDS[handle]
    library.nvmlDeviceGetName = lambda handle: names[handle].encode()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["NVIDIA H100 PCIe", "NVIDIA H200"])
    assert devices() == devices("cuda") == Devices("cuda", 2, "NVIDIA H100 PCIe")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices() == Devices("cuda", 1, "NVIDIA H200")
    assert devices("cpu").kind == "cpu"


def test_hidden_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ["NVIDIA H200"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices().kind == "cpu"
    with pytest.raises(RunError, match="no usable NVIDIA GPU") as caught:
        devices("cuda")
    assert "CUDA_VISIBLE_DEVICES" in (caught.value.hint or "")


@pytest.mark.parametrize("how", ["no package", "no driver", "no device"])
def test_cpu_is_used_without_gpus(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [], fails=how == "no driver")
    if how == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    detected = devices()
    assert (detected.kind, detected.count) == ("cpu", len(os.sched_getaffinity(0)))
    assert detected.name
    with pytest.raises(RunError) as caught:
        devices("cuda")
    assert "train.device" in (caught.value.hint or "")


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A CPU @ 2.50GHz\n" * 2)
    assert detect._cpu_name(info) == "A CPU @ 2.50GHz"
    info.write_text("processor\t: 0\n")
    assert detect._cpu_name(info)
    assert detect._cpu_name(tmp_path / "none")


def test_this_cpu_splits_memory_among_workers() -> None:
    whole, half = this_cpu(), this_cpu(2)
    assert whole.memory_bytes == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    assert half.memory_bytes == whole.memory_bytes // 2
    assert half.peak("float32") == pytest.approx(whole.peak("float32") / 2)
