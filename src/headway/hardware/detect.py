"""Detects this machine's devices without torch: GPUs through NVML, else the CPU."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from headway.errors import RunError
from headway.hardware.chips import Chip, known_chip

ASSUMED_CORES = 16
"""Cores of the CPU in the catalogue."""


@dataclass(frozen=True)
class Devices:
    """Devices for workers: one per GPU; on the CPU `count` is the cores this process may use."""

    kind: Literal["cpu", "cuda"]
    count: int
    name: str


def devices(kind: Literal["auto", "cpu", "cuda"] = "auto") -> Devices:
    """The devices to run on; auto takes the GPUs that CUDA_VISIBLE_DEVICES leaves, else the CPU."""
    if kind == "cpu":
        return _cpu()
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        return Devices("cuda", len(gpus), gpus[0][1])
    if kind == "auto":
        return _cpu()
    hint = "set train.device to auto or cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        hint += f", or check CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    raise RunError("no usable NVIDIA GPU on this machine", hint=hint, usage=True)


def this_cpu(workers: int = 1) -> Chip:
    """One worker's share of this machine's CPU memory and cores; speeds stay assumed."""
    catalogue = known_chip("cpu")
    share = len(os.sched_getaffinity(0)) / ASSUMED_CORES / workers if hasattr(os, "sched_getaffinity") else 1 / workers
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // workers
    peaks = MappingProxyType({name: peak * share for name, peak in catalogue.peaks.items()})
    return replace(
        catalogue, memory_bytes=memory, peaks=peaks, bandwidth_bytes_s=catalogue.bandwidth_bytes_s * min(1.0, share)
    )


def visible(setting: str | None, uuids: Sequence[str]) -> list[str]:
    """The UUIDs that CUDA_VISIBLE_DEVICES selects, by CUDA's rules.

    Entries are indices or UUID prefixes; the first invalid entry ends the list, and a duplicate empties it. MIG slices
    (MIG-...) stand for themselves: NVML lists only full GPUs.
    """
    if setting is None:
        return list(uuids)
    chosen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):
            matches = [entry]
        elif entry.startswith("GPU-"):
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        else:
            matches = [uuids[int(entry)]] if entry.isdecimal() and int(entry) < len(uuids) else []
        if len(matches) != 1:
            break
        chosen += matches
    return chosen if len(set(chosen)) == len(chosen) else []


def gpu_uuids() -> list[str]:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in order; none without NVML."""
    return [uuid for uuid, _ in _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))]


def _gpus(setting: str | None) -> list[tuple[str, str]]:
    """UUIDs and names of the visible GPUs in order; none without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or an unresponsive one: no GPU to use
        return []
    try:
        every = range(pynvml.nvmlDeviceGetCount())
        uuids = [_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in every]
        seen = visible(setting, uuids)
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()) for uuid in seen]
        return [(uuid, _text(pynvml.nvmlDeviceGetName(handle))) for uuid, handle in zip(seen, handles, strict=True)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """NVML's bindings return bytes before version 11.5, str since."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu() -> Devices:
    return Devices("cpu", _cores(), _cpu_name(Path("/proc/cpuinfo")))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name(cpuinfo: Path) -> str:
    """The processor's model from cpuinfo, or the platform's name for it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine() or "CPU"
