"""Measures the ceilings of this machine's devices; runs as `python -m headway.measure.device`.

Reads one JSON object on standard input, {"device": "cpu" or "cuda", "quick": bool, "ranks": devices in collectives},
and writes JSON lines: {"progress": title, "share": 0..1}, then {"ceilings": {...}}, or {"error", "hint"} with exit
status 1.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headway.errors import HeadwayError, RunError
from headway.hardware import devices, find_chip
from headway.hardware.ceilings import Backend, Ceilings, GemmGrid, SustainedGemm
from headway.measure import operations
from headway.measure.collectives import collectives
from headway.measure.operations import Case, Mode, OperandPool
from headway.measure.timer import DeviceTimer

Progress = Callable[[str, float], None]

MIB = 2**20
OCTAVES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HALVES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# (width, kv width, hidden): decoders of 1B, 8B, 32B and 70B, and one of 405B split among eight devices.
WIDTHS = ((2048, 512, 8192), (4096, 1024, 14336), (5120, 1024, 27648), (8192, 1024, 28672), (16384, 128, 6656))


@dataclass(frozen=True)
class BenchmarkGrid:
    """The points to measure."""

    gemm: dict[str, tuple[int, ...]]
    """Sizes of m, n and k of GEMMs, by precision."""
    pool_elements: int
    shapes: tuple[tuple[int, int, int], ...]
    """Tokens, outputs and inputs of linear layers, off the grid."""
    seq: tuple[int, ...]
    tokens: int
    attention: tuple[Case, ...]
    """Backend, head size, causal, heads, key heads."""
    memory: tuple[int, ...]
    copies: tuple[int, ...]
    host: tuple[Mode, ...]
    collectives: tuple[int, ...]
    sustained_s: float
    timer: dict[str, float]


def _attention_cases(backends: Sequence[Backend], head_dims: Sequence[int]) -> tuple[Case, ...]:
    every = [(b, h, c, 32, 32) for b in backends for h in head_dims for c in (True, False)]
    return (*every, *((b, 128, True, 32, 8) for b in backends))


GPU = BenchmarkGrid(
    gemm={"bfloat16": HALVES, "float8": HALVES, "tf32": OCTAVES[2:], "float32": (256, 1024, 4096, 8192)},
    pool_elements=2**31,
    shapes=(
        *operations.layer_shapes(WIDTHS, (2048, 5000, 8192, 16384)),
        *((tokens, 128256, width) for tokens in (2048, 8192) for width in (2048, 4096)),
    ),
    seq=(512, 1024, 2048, 4096, 8192, 16384, 32768),
    tokens=16384,
    attention=_attention_cases(("default", "flash", "cudnn"), (64, 128)),
    memory=(MIB // 4, 2 * MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
    copies=(MIB // 4, 4 * MIB, 64 * MIB, 256 * MIB),
    host=("autocast", "plain", "compiled"),
    collectives=(MIB // 16, MIB, 16 * MIB, 256 * MIB, 1024 * MIB),
    sustained_s=4.0,
    timer={"group_s": 1e-3},
)
GPU_QUICK = BenchmarkGrid(
    gemm={"bfloat16": (256, 1024, 4096, 8192), "float8": (256, 1024, 4096, 8192)},
    pool_elements=2**28,
    shapes=tuple(operations.layer_shapes(WIDTHS[1:2], (8192,))),
    seq=(1024, 4096, 16384),
    tokens=16384,
    attention=_attention_cases(("default",), (128,)),
    memory=(2 * MIB, 256 * MIB),
    copies=(4 * MIB, 64 * MIB),
    host=("autocast", "plain"),
    collectives=(MIB, 64 * MIB),
    sustained_s=1.0,
    timer={},
)
CPU = BenchmarkGrid(
    gemm={"float32": (32, 64, 128, 256, 512)},
    pool_elements=2**21,
    shapes=tuple(operations.layer_shapes(((256, 128, 704),), (200, 600))),
    seq=(128, 512, 1024),
    tokens=1024,
    attention=(("default", 64, True, 4, 4), ("default", 64, False, 4, 4), ("default", 64, True, 4, 2)),
    memory=(MIB // 4, 4 * MIB),
    copies=(),
    host=("autocast", "plain"),
    collectives=(MIB // 16, MIB, 16 * MIB),
    sustained_s=0.5,
    timer={"groups": 3, "group_s": 2e-3, "budget_s": 0.05},
)
CPU_QUICK = BenchmarkGrid(
    gemm={"float32": (32, 128)},
    pool_elements=2**17,
    shapes=((48, 96, 64),),
    seq=(32, 64),
    tokens=64,
    attention=(("default", 16, True, 2, 2), ("default", 16, False, 2, 2)),
    memory=(MIB // 4,),
    copies=(),
    host=("plain",),
    collectives=(MIB // 64,),
    sustained_s=0.05,
    timer={"groups": 3, "group_s": 1e-4, "budget_s": 1e-2},
)


def measure(device: torch.device, grid: BenchmarkGrid, ranks: int, progress: Progress) -> Ceilings:
    """Measure everything in the grid; `skipped` names what the device cannot do."""
    timer = DeviceTimer(device, **grid.timer)  # type: ignore[arg-type]
    results: dict[str, list[Any]] = {}
    skipped: dict[str, str] = {}
    for title, section, measured in _sections(timer, grid, ranks):
        progress(title, 0.0)
        try:
            _collect(title, measured(), results.setdefault(section, []), progress)
        except torch.OutOfMemoryError:
            raise  # an incomplete grid would pass for a complete one
        except (RuntimeError, NotImplementedError) as error:  # a missing kernel must not stop the rest
            skipped[title] = str(error).strip().splitlines()[0][:200]
    torch.set_float32_matmul_precision("highest")
    launch, kernel = operations.smallest_operation(timer)
    facts = {"timer": timer.kind, "launch_microseconds": launch, "kernel_microseconds": kernel, "skipped": skipped}
    return Ceilings.model_validate({**_identity(device, results["gemm"]), **facts, **results})


def _sections(
    timer: DeviceTimer, grid: BenchmarkGrid, ranks: int
) -> Iterator[tuple[str, str, Callable[[], Iterable[Any]]]]:
    """Yield (title, field of Ceilings, measurement), in order."""
    dtype = torch.bfloat16 if timer.device.type == "cuda" else torch.float32
    for precision, sizes in _supported(grid.gemm, timer.device).items():
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        pool = OperandPool(timer.device, precision, grid.pool_elements)
        large = max(sizes[-1] // 2, sizes[0])
        yield f"GEMMs in {precision}", "gemm", partial(operations.gemm, timer, pool, precision, sizes)
        if precision not in ("tf32", "float32") or timer.device.type == "cpu":
            shapes = partial(operations.gemm_shapes, timer, pool, precision, grid.shapes)
            yield f"linear layers in {precision}", "gemm_shapes", shapes
        sustained = partial(_sustained, timer, pool, precision, large, grid.sustained_s)
        yield f"sustained GEMM in {precision}", "sustained", sustained
    attention = partial(operations.attention, timer, dtype, grid.seq, grid.attention, grid.tokens)
    yield "attention", "attention", attention
    yield "memory", "memory", partial(operations.memory, timer, dtype, grid.memory)
    if grid.copies:
        yield "copies", "copies", partial(operations.copies, timer, grid.copies)
    for mode in grid.host:
        yield f"host, {mode}", "host", partial(operations.host, timer, mode)
    if ranks > 1:
        yield "collectives", "collectives", partial(collectives, timer.device.type, ranks, grid.collectives)


def _collect(title: str, measured: Iterable[Any], results: list[Any], progress: Progress) -> None:
    """Collect results; report the floats in between as progress."""
    for item in measured:
        if isinstance(item, float):
            progress(title, item)
        else:
            results.append(item)


def _supported(gemm: dict[str, tuple[int, ...]], device: torch.device) -> dict[str, tuple[int, ...]]:
    """The precisions that the device supports: float8 needs compute capability 8.9."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return {name: sizes for name, sizes in gemm.items() if name != "float8"}
    return gemm


def _sustained(
    timer: DeviceTimer, pool: OperandPool, precision: str, size: int, seconds: float
) -> Iterator[SustainedGemm]:
    """A large GEMM for seconds; power and clocks are read near the end, while it runs."""
    work = operations.gemm_work(pool, precision, "forward", size, size, size)
    once = timer.seconds(work)
    count, settled = max(2, round(seconds / once)), dict[str, float]()
    timer.wait()
    started = last = time.perf_counter()
    for i in range(count):
        work(i)
        if i % 100 == 99 or i == count - 1:
            # Waiting every hundred keeps the queue short with little idle time.
            settled = _state(timer.device) if last - started > seconds / 2 else settled
            timer.wait()
            last = time.perf_counter()
    rate = count * 2.0 * size**3 / (last - started)
    yield SustainedGemm(
        precision=precision, size=size, flops_s=float(f"{rate:.4g}"), seconds=float(f"{last - started:.3g}"), **settled
    )


def _state(device: torch.device) -> dict[str, float]:
    """Clock, power and temperature as the driver reports them, if it does."""
    if device.type != "cuda":
        return {}
    try:
        return {
            "clock_mhz": float(torch.cuda.clock_rate(device)),
            "power_w": torch.cuda.power_draw(device) / 1e3,
            "temperature_c": float(torch.cuda.temperature(device)),
        }
    except Exception:  # the binding may be missing or refused; the measurement is useful without it
        return {}


def _identity(device: torch.device, grids: list[GemmGrid]) -> dict[str, Any]:
    """Device, chip, and the peaks that efficiencies are relative to."""
    best = {grid.precision: max(_rates(grid)) for grid in grids}
    about: dict[str, Any] = {"kind": device.type, "torch": torch.__version__}
    if device.type == "cpu":
        return {**about, "device": devices("cpu").name or platform.machine(), "chip": None, "peaks": best}
    properties = torch.cuda.get_device_properties(device)
    chip = find_chip(properties.name)
    peaks = {name: chip.peaks.get(name, rate) if chip else rate for name, rate in best.items()}
    return {
        **about,
        "device": properties.name,
        "chip": chip.name if chip else None,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "peaks": peaks,
    }


def _rates(grid: GemmGrid) -> Iterator[float]:
    points = ((m, n, k) for m in grid.m for n in grid.n for k in grid.k)
    return (2.0 * m * n * k / (time_us / 1e6) for (m, n, k), time_us in zip(points, grid.microseconds, strict=True))


def _serve(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    quick = bool(request["quick"])
    if request["device"] == "cuda":
        if not torch.cuda.is_available():
            raise RunError("torch cannot use a GPU here", hint="install a build of torch for CUDA, or --device cpu")
        grid, device = GPU_QUICK if quick else GPU, torch.device("cuda", 0)
    else:
        grid, device = CPU_QUICK if quick else CPU, torch.device("cpu")
    return measure(device, grid, int(request["ranks"]), progress).model_dump(mode="json")


def main() -> int:
    """Serve one request."""
    request = json.load(sys.stdin)
    last_report = [0.0]

    def progress(what: str, share: float) -> None:
        now = time.monotonic()
        if share == 0.0 or now - last_report[0] > 0.5:
            last_report[0] = now
            print(json.dumps({"progress": what, "share": round(share, 3)}), flush=True)

    try:
        answer: dict[str, Any] = {"ceilings": _serve(request, progress)}
    except HeadwayError as error:
        answer = {"error": error.message, "hint": error.hint}
    except torch.OutOfMemoryError:
        answer = {"error": "the device ran out of memory", "hint": "stop other processes on it, or try --quick"}
    print(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
