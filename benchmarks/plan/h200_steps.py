"""Real training steps on one GPU, as truth for the plan's predictions: time, memory, and what the device did.

    python benchmarks/plan/h200_steps.py --out steps.json [--only NAME ...] [--budget-s 480] [--tiny]

Each case is the package's own model, precision, optimizer and order of work (see `headway.train.loop`) on random
tokens. Steps are stamped by device events while the host runs ahead, as in a run; two more steps outside the timing
give memory by phase and device time by class of kernel. Beside FILE goes FILE.kernels.json with every kernel's time.
"""

import argparse
import gc
import json
import re
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from headway.models import empty_decoder
from headway.parallel import World, parallelize_model, total_norm
from headway.recipe import Data, Model, Recipe, Train
from headway.train.build import build_optimizer
from headway.train.meter import DeviceMeter
from headway.train.schedule import learning_rate

PHASES = ("forward", "backward", "clip", "optimizer")
WARM_STEPS, WARM_S = 4, 2.0
STEPS, MOST_STEPS, TIMED_S = 8, 40, 3.0
BATCHES = 64
OVERHEADS = ("Command Buffer Full", "Activity Buffer Request")
"""The profiler's names for the host's waits; it lists a kernel under them once more."""
LLAMA = {"vocab_size": 128256, "rope_theta": 500000.0}

SHAPES = {
    "tiny": {"layers": 2, "dim": 64, "heads": 2, "kv_heads": 1, "vocab_size": 512},
    "0.1B": {"layers": 12, "dim": 768, "heads": 12, "vocab_size": 32000},
    "0.4B": {"layers": 24, "dim": 1024, "heads": 16, "vocab_size": 50304},
    "0.5B": {"layers": 24, "dim": 1280, "heads": 10, "kv_heads": 5, "vocab_size": 32000},
    "1.2B": LLAMA | {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192},
    "3.2B": LLAMA | {"layers": 28, "dim": 3072, "heads": 24, "kv_heads": 8, "hidden": 8192},
    "6.7B": {"layers": 32, "dim": 4096, "heads": 32, "hidden": 11008, "vocab_size": 32000, "tie_embeddings": False},
    "8B": LLAMA | {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "tie_embeddings": False},
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a shape and how a step of it is done."""

    shape: str
    seq: int
    microbatch: int
    accumulate: int = 1
    checkpoint: bool = False
    compile: bool = False

    @property
    def name(self) -> str:
        marks = [f"x{self.accumulate}"] * (self.accumulate > 1) + ["ckpt"] * self.checkpoint + ["comp"] * self.compile
        return "-".join([self.shape, f"{self.microbatch}x{self.seq}", *marks])

    @property
    def model(self) -> Model:
        return Model(**SHAPES[self.shape])

    @property
    def train(self) -> Train:
        rows = self.microbatch * self.accumulate
        choices = {"recompute": "full" if self.checkpoint else "none", "compile": self.compile}
        return Train(batch=rows, microbatch=self.microbatch, dtype="bfloat16", **choices)


CASES = [
    Case("0.1B", 1024, 16),
    Case("0.1B", 1024, 4),
    Case("0.1B", 1024, 1),
    Case("0.1B", 1024, 1, checkpoint=True),
    Case("0.1B", 1024, 8, accumulate=2),
    Case("0.4B", 2048, 8),
    Case("0.4B", 2048, 16, checkpoint=True),
    Case("0.4B", 32768, 1, checkpoint=True),
    Case("0.5B", 2048, 8),
    Case("1.2B", 4096, 4),
    Case("1.2B", 8192, 2),
    Case("1.2B", 4096, 2, accumulate=2),
    Case("1.2B", 4096, 8, checkpoint=True),
    Case("1.2B", 32768, 1, checkpoint=True),
    Case("1.2B", 4096, 4, compile=True),
    Case("3.2B", 4096, 2),
    Case("3.2B", 8192, 2, checkpoint=True),
    Case("6.7B", 4096, 1, checkpoint=True),
    Case("8B", 2048, 1, checkpoint=True),
    Case("8B", 4096, 1, checkpoint=True),
    Case("8B", 8192, 1, checkpoint=True),
    Case("0.1B", 1024, 16, compile=True),
    Case("0.1B", 1024, 1, compile=True),
    Case("0.5B", 2048, 16, compile=True),
    Case("1.2B", 8192, 4, checkpoint=True, compile=True),
    Case("3.2B", 4096, 2, compile=True),
    Case("3.2B", 16384, 1, checkpoint=True),
    Case("6.7B", 2048, 2, accumulate=2, checkpoint=True),
    Case("0.1B", 2048, 16),
    Case("0.5B", 2048, 16),
    Case("8B", 16384, 1, checkpoint=True),
    Case("6.7B", 4096, 1, checkpoint=True, compile=True),
    Case("3.2B", 8192, 4),
]
TINY = [Case("tiny", 32, 2), Case("tiny", 32, 2, accumulate=2, checkpoint=True)]


class Stepper:
    """A model and its optimizer on a device, and one step of work on them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.train, self.world = case, case.train, World(rank=0, size=1, device=device)
        recipe = Recipe(model=case.model, data=Data(path="-", seq=case.seq), train=self.train)
        self.model = parallelize_model(empty_decoder(case.model, "meta"), recipe, self.world).model
        draw(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = build_optimizer(self.model, self.train)
        # Fresh tokens for every step: a model that knows its batch by heart has gradients like no training's, and
        # what they cost in power shows in the clock.
        shape = (BATCHES, self.train.batch, case.seq + 1)
        self.tokens = torch.randint(0, case.model.vocab_size, shape, pin_memory=device.type == "cuda")
        self.steps = 0

    def step(self, reach=lambda _phase: None) -> Tensor:
        """What the training loop does in a step, in its order; `reach` is called at the end of each phase."""
        self.steps += 1
        model, optimizer, device = self.model, self.optimizer, self.world.device
        tokens = self.tokens[self.steps % BATCHES].to(device, non_blocking=True)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        loss = torch.zeros((), device=device)
        for low in range(0, self.train.batch, self.case.microbatch):
            rows = slice(low, low + self.case.microbatch)
            part = model(inputs[rows], labels[rows]) / labels.numel()
            reach("forward")
            part.backward()
            loss += part.detach()
            reach("backward")
        norm = total_norm(self.parameters, self.world)
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.train.clip, norm)
        reach("clip")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        reach("optimizer")
        return torch.stack([loss.double(), norm.double()])


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Random weights, drawn on the device: values as in a fresh run, without waiting for the CPU to draw them."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def run_steps(stepper: Stepper, least: int, most: int, seconds: float) -> tuple[dict, dict]:
    """Timings of steps with the host ahead as in a run, and the device's state while the last ones run."""
    stamps, values, pending = [[("begin", stamp())]], [], deque()
    wall = [time.perf_counter()]
    while len(stamps) <= least or (len(stamps) <= most and wall[-1] - wall[0] < seconds):
        marks: list = []
        values.append(stepper.step(lambda phase, marks=marks: marks.append((phase, stamp()))))
        stamps.append(marks)
        pending.append(marks[-1][1])
        if len(pending) > DeviceMeter.LAG and pending[0] is not None:
            pending.popleft().synchronize()
        wall.append(time.perf_counter())
    state = device_state(stepper.world.device)
    synchronize(stepper.world.device)
    whole = (time.perf_counter() - wall[0]) / (len(stamps) - 1)
    return summary(stamps, wall, whole) | {"loss": [round(v[0].item(), 4) for v in (values[0], values[-1])]}, state


def summary(stamps: list, wall: list[float], whole: float) -> dict:
    """Medians over steps, whole and by phase, in seconds."""
    flat = [[("begin", before[-1][1]), *marks] for before, marks in pairwise(stamps)]
    if flat[0][0][1] is None:
        return {"steps": len(flat), "step_s": spread([b - a for a, b in pairwise(wall)])}
    spent = [dict.fromkeys(PHASES, 0.0) for _ in flat]
    for marks, sums in zip(flat, spent, strict=True):
        for (_, a), (phase, b) in pairwise(marks):
            sums[phase] += a.elapsed_time(b) / 1e3
    return {
        "steps": len(flat),
        "step_s": spread([marks[0][1].elapsed_time(marks[-1][1]) / 1e3 for marks in flat]),
        "wall_s": rounded(whole),
        "phases_s": {phase: rounded(median(sums[phase] for sums in spent)) for phase in PHASES},
    }


def memory_by_phase(stepper: Stepper) -> dict:
    """Bytes before a step, and per phase the peak in it and what is left after it, of the microbatch with most."""
    before = torch.cuda.memory_allocated()
    peak, after = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
    torch.cuda.reset_peak_memory_stats()

    def reach(phase: str) -> None:
        peak[phase] = max(peak[phase], torch.cuda.max_memory_allocated())
        after[phase] = max(after[phase], torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    stepper.step(reach)
    torch.cuda.synchronize()
    return {"before": before, "peak": peak, "after": after}


def host_seconds(stepper: Stepper) -> float:
    """Host time to launch one step on an idle device; a long step also waits for the device's queue."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    stepper.step()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return rounded(taken)


def profile(stepper: Stepper) -> tuple[list[dict], dict]:
    """Kernels of one step by name and by the operation that asked for them; and their number and time in all."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        stepper.step()
        torch.cuda.synchronize()
    events = profiler.events()
    # On the device's timeline a marked region appears as an event of its own, over the kernels inside it.
    regions = {event.name for event in events if event.is_user_annotation}
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.name not in regions]
    seconds = sum(event.time_range.elapsed_us() for event in on_device) / 1e6
    return rows_of(events, regions), {"kernels": len(on_device), "kernel_s": rounded(seconds)}


def rows_of(events, regions: set[str]) -> list[dict]:
    """Kernels added up by name and by the chain of operations that launched them, longest first."""
    count, us = Counter(), Counter()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU or event.name in OVERHEADS:
            continue
        chain, parent = [event.name], event.cpu_parent
        while parent is not None:
            chain, parent = [parent.name, *chain], parent.cpu_parent
        for kernel in event.kernels:
            if kernel.name not in regions:
                key = (kernel.name[:100], " > ".join(chain), str(event.input_shapes))
                count[key] += 1
                us[key] += kernel.duration
    names = ("kernel", "chain", "shapes")
    return [dict(zip(names, key, strict=True)) | {"count": count[key], "us": us[key]} for key, _ in us.most_common()]


def class_of(kernel: str, chain: str) -> str:
    """The class of a kernel: the first matching rule."""
    attention = re.search(r"aten::_(scaled_dot_product|flash|cudnn|efficient)\w*attention(\w*backward)?", chain)
    product = re.search(r"gemm|nvjet|cutlass|xmma|splitk|cublas", kernel, re.IGNORECASE)
    rules = (
        ("memory", kernel.startswith(("Memcpy", "Memset"))),
        ("optimizer", "Optimizer.step" in chain),
        ("clip", re.search(r"_foreach_|vector_norm", chain)),
        ("attention backward", attention and attention[2]),
        ("attention forward", attention),
        ("loss gemm", product and "_SummedCrossEntropy" in chain),
        ("gemm", product),
        ("loss", "_SummedCrossEntropy" in chain),
        ("fused", kernel.startswith("triton_")),
        ("norm", "rms_norm" in chain),
        ("embedding", "embedding" in chain),
        ("cast and copy", "aten::copy_" in chain),
        ("elementwise", re.search(r"elementwise|reduce_kernel|CatArray", kernel)),
    )
    return next((name for name, fits in rules if fits), "other")


def by_class(rows: list[dict]) -> dict[str, float]:
    """Device seconds of each class of kernel, longest first."""
    us = Counter()
    for row in rows:
        us[class_of(row["kernel"], row["chain"])] += row["us"]
    return {name: rounded(total / 1e6) for name, total in us.most_common()}


def measure(case: Case, device: torch.device) -> tuple[dict, list[dict]]:
    """Measure one case; returns its row and its kernels."""
    gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if gpu else 0
    started = time.perf_counter()
    stepper = Stepper(case, device)
    warm, _ = run_steps(stepper, WARM_STEPS, 10 * MOST_STEPS, WARM_S)
    result = {"first_steps_s": rounded(time.perf_counter() - started), "first_loss": warm["loss"][0]}
    if not gpu:
        return result | run_steps(stepper, 2, 2, 0.0)[0], []
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    timed, state = run_steps(stepper, STEPS, MOST_STEPS, TIMED_S)
    result |= timed | {"device_state": state, "allocated_before_build": before}
    result |= {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}
    result["alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    result["host_s"] = min(host_seconds(stepper), host_seconds(stepper))
    result["memory"] = memory_by_phase(stepper)
    kernels, totals = profile(stepper)
    result |= totals | {"classes_s": by_class(kernels)}
    result["linked_s"] = rounded(sum(row["us"] for row in kernels) / 1e6)
    result["host_bound"] = result["kernel_s"] < 0.93 * result["step_s"]["median"]
    return result, kernels


def attempt(case: Case, device: torch.device) -> tuple[dict, list[dict]]:
    """One case's row; running out of memory, or anything else, is written down and ends only this case."""
    about = asdict(case) | {"parameters": count(case.model), "model": case.model.model_dump(exclude_defaults=True)}
    try:
        result, kernels = measure(case, device)
    except torch.OutOfMemoryError as error:
        result, kernels = {"out_of_memory": str(error).splitlines()[0][:300]}, []
        result["peak_allocated"] = torch.cuda.max_memory_allocated()
    except Exception as error:
        result, kernels = {"error": f"{type(error).__name__}: {error}"[:500]}, []
    return {"name": case.name} | about | result, kernels


def count(model: Model) -> int:
    return sum(parameter.numel() for parameter in empty_decoder(model, "meta").parameters())


def device_state(device: torch.device) -> dict:
    """Clocks, power and temperature as the driver reports them, if it does."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "clock_reasons": hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except Exception as error:  # no driver binding: the timings stand without it
        return {"unknown": str(error)[:100]}


def stamp() -> "torch.cuda.Event | None":
    """A mark on the device's timeline; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def spread(seconds: list[float]) -> dict:
    return {"median": rounded(median(seconds)), "min": rounded(min(seconds)), "max": rounded(max(seconds))}


def rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def clean() -> None:
    """Free everything, so that no case starts with another's memory or compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write(path: Path, content: object) -> None:
    """JSON with one line per innermost list and object."""
    text = json.dumps(content, indent=1)
    flat = re.sub(r"([\[{])\s+([^\[\]{}]*?)\s+([\]}])", lambda m: m[1] + re.sub(r"\n\s+", " ", m[2]) + m[3], text)
    path.write_text(flat + "\n")


def line(row: dict) -> str:
    """A row as text."""
    if "step_s" not in row:
        return f"{row['name']:24} {row.get('out_of_memory') or row.get('error')}"
    peak = row.get("peak_allocated", 0) / 2**30
    shares = {key: value / row["kernel_s"] for key, value in row.get("classes_s", {}).items()}
    text = " ".join(f"{key} {share:.0%}" for key, share in shares.items() if share >= 0.005)
    return f"{row['name']:24} {row['step_s']['median'] * 1e3:8.1f} ms {peak:6.1f} GiB {row.get('device_state')} {text}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=None, help="names of cases")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no case after this")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    about = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    rows, kernels, started = [], {}, time.monotonic()
    for case in TINY if options.tiny else CASES:
        wanted = options.only is None or case.name in options.only
        if not wanted or time.monotonic() - started > options.budget_s:
            continue
        row, kernels[case.name] = attempt(case, device)
        clean()
        rows.append(row)
        print(f"{time.monotonic() - started:6.0f} s  {line(row)}", flush=True)
        write(options.out, about | {"rows": rows})
        write(options.out.with_suffix(".kernels.json"), kernels)


if __name__ == "__main__":
    main()
