"""Every kernel beside PyTorch eager, torch.compile and Liger-Kernel, on one GPU: time and share of what binds.

    python benchmarks/kernels/run.py [OPERATION ...] [--json FILE]

The limit of a case is what its bytes or its FLOPs take at the ceilings measured in the same run (a copy of 4 GiB, an
8192-cubed bfloat16 product). Ways take turns, the second-level cache is flushed before each call, and medians count.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from case import Case

MODULES = ("rms_norm", "rope", "gated", "linear_cross_entropy", "adamw", "newton_schulz", "clip")
ROUNDS = 15
AHEAD_CYCLES = 6_000_000
"""About 3 ms of the device's, in which the host puts a call's launches into the queue: the device's time counts."""


def seconds(call: Callable[[], object], flush: torch.Tensor, repeat: int = 1) -> float:
    """One call on the device, after the cache was emptied; the device waits until all of it is in its queue."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def ceilings(flush: torch.Tensor) -> tuple[float, float]:
    """Bytes and FLOPs a second that this device reaches."""
    a = torch.empty(2**30, device="cuda")
    b = torch.empty_like(a)
    copied = statistics.median(seconds(lambda: b.copy_(a), flush) for _ in range(10))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiplied = statistics.median(seconds(lambda: x @ y, flush, 5) for _ in range(10))
    return 2 * 2**32 / copied, 2 * 8192**3 / multiplied


def measured(case: Case, flush: torch.Tensor, bytes_s: float, flops_s: float) -> dict:
    """Medians of every way, in turns."""
    for call in case.ways.values():
        for _ in range(3):
            call()
    times = {way: [] for way in case.ways}
    for _ in range(ROUNDS):
        for way, call in case.ways.items():
            times[way].append(seconds(call, flush))
    medians = {way: statistics.median(found) for way, found in times.items()}
    limit = max(case.bytes / bytes_s, case.flops / flops_s)
    return {
        "operation": case.operation,
        "shape": case.shape,
        "limit_s": limit,
        "binds": "bytes" if case.bytes / bytes_s >= case.flops / flops_s else "flops",
        "seconds": medians,
        "share_of_limit": {way: limit / found for way, found in medians.items()},
    }


def main() -> None:
    """Run the cases of all modules, or of those named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("operations", nargs="*", choices=[[], *MODULES], default=[])
    parser.add_argument("--ways", nargs="*", help="Only these: headway, eager, compiled, liger, torch.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    flush = torch.empty(2**26, device="cuda", dtype=torch.int32)
    bytes_s, flops_s = ceilings(flush)
    print(f"{torch.cuda.get_device_name()}: {bytes_s / 1e12:.2f} TB/s, {flops_s / 1e12:.0f} TFLOP/s bf16")
    rows = []
    for name in options.operations or MODULES:
        for case in import_module(name).cases():
            if options.ways:
                case = replace(case, ways={way: case.ways[way] for way in case.ways if way in options.ways})
            row = measured(case, flush, bytes_s, flops_s)
            rows.append(row)
            shares = "  ".join(
                f"{way} {row['seconds'][way] * 1e6:.0f} us ({share:.0%})"
                for way, share in row["share_of_limit"].items()
            )
            print(f"{row['operation']:<22}{row['shape']:<34}{shares}", flush=True)
            del case
            torch.cuda.empty_cache()
    if options.json:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes_s": bytes_s}
        options.json.write_text(json.dumps({**found, "flops_s": flops_s, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
