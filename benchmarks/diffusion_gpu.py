"""A training step of diffusion transformers on one device: Headway beside diffusers, eager and compiled.

    python benchmarks/diffusion_gpu.py [--rows NAME ...] [--ways WAY ...] [--variants NAME ...] [--json FILE]

Every way of a row runs in a process of its own, warms up, then times steps of random latents on its own clock, the
device idle before the first and after the last. All train with flow matching, float32 weights and AdamW states, bf16
products, and clip gradients to a norm of 1. Headway's step is the trainer's own (`headway.parallel.apply`, its
objective, optimizer and norm); diffusers' optimizer is torch's fused AdamW, and its blocks are compiled one by one, as
Headway's are (`diffusers whole` compiles the model at once).

    headway                 the fastest settings of the row
    headway deterministic   the same with train.deterministic
    headway selective       the same with train.recompute = "selective"
    headway fed             latents and text states from files, noise drawn per step: what the device waits for data
    headway unfused         the same without the kernels of `kernels.dispatch.OF_DIFFUSION`
    headway without KERNEL  the same without one of them: `--variants modulation heads gelu`

A process imports what it needs while the one before it measures. `--together` starts all at once and has each compile
with a model of one layer; then they measure one after the other, the rest asleep. In two and a half minutes:

    python benchmarks/diffusion_gpu.py --together --seconds 3 --limit-s 145 --ways headway "diffusers compiled" \\
        --more "wan 17,160 tokens:headway deterministic" "wan 17,160 tokens:headway fed"

The planned time is `headway plan`'s for an H200. Results are written after each way; ways that the limit leaves no time
for are listed. The memory is the largest that the device's allocator held. `--rows tiny --device cpu` is a smoke test.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WAN = {"family": "wan", "layers": 30, "dim": 1536, "heads": 12, "hidden": 8960, "text_dim": 4096, "text_tokens": 512}
ROWS: dict[str, dict[str, Any]] = {
    "wan 17,160 tokens": {
        "model": WAN, "shape": (16, 11, 60, 104), "batch": 1,
        "ways": (
            "headway", "headway unfused", "diffusers compiled", "headway deterministic", "headway fed", "diffusers",
        ),
    },
    "wan 32,760 tokens": {
        "model": WAN, "shape": (16, 21, 60, 104), "batch": 1, "peer_recomputes": True,
        "ways": ("headway", "headway unfused", "diffusers compiled", "diffusers"),
    },
    "dit-xl/2 256": {
        "model": {"family": "dit", "layers": 28, "dim": 1152, "heads": 16, "num_classes": 1000, "base_size": 32},
        "shape": (4, 1, 32, 32), "batch": 256,
        "ways": ("headway", "headway unfused", "diffusers compiled", "diffusers"),
    },
    "tiny": {
        "model": WAN | {"layers": 2, "dim": 48, "heads": 2, "hidden": 96, "text_dim": 32, "text_tokens": 16},
        "shape": (16, 2, 8, 8), "batch": 1,
        "ways": ("headway", "headway deterministic", "headway selective", "headway fed", "diffusers"),
    },
}  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "unfused": ("modulation", "heads", "gelu"), "modulation": ("modulation",), "heads": ("heads",), "gelu": ("gelu",),
}  # fmt: skip
"""Kernels of diffusion blocks to leave to the compiler, by the name of a variant."""


def variant_way(name: str) -> str:
    """Return the way of a variant."""
    return "headway unfused" if name == "unfused" else f"headway without {name}"


WAYS = (
    *(variant_way(name) for name in VARIANTS), "headway", "headway deterministic", "headway selective", "headway fed",
    "diffusers", "diffusers compiled", "diffusers whole",
)  # fmt: skip
WARM, ROUNDS = 3, 3
READY = "ready"
FILED = 16
"""Samples of `headway fed`."""
Step = Callable[[], Tensor]


def main() -> None:
    """Run rows, each way in its own process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[name for name in ROWS if name != "tiny"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="By default those of the row.")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[], help="Also measured, for each row.")
    parser.add_argument("--more", nargs="*", default=[], metavar="ROW:WAY", help="Measured after these.")
    parser.add_argument(
        "--together", action="store_true", help="Compile all ways at once before the first is measured."
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="Of steps that are timed, per way.")
    parser.add_argument("--limit-s", type=float, default=470.0, help="Of the whole table.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="Settings of Headway's recipe.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="Append a table of kernels of one step of each way.")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import_ahead(options.one[1])
        if options.together:
            compile_ahead(*options.one, options)
        print(READY, flush=True)
        if not sys.stdin.readline():
            return  # there is nobody left to measure for
        print(json.dumps(measured(*options.one, options)))
        return
    end, results = time.monotonic() + options.limit_s, list[dict[str, Any]]()
    print(f"{'row':<19}{'way':<23}{'s/step':>8}{'GiB':>7}{'loss':>8}{'plan':>8}{'off':>7}  first", flush=True)
    ways = [(row, way) for row in options.rows for way in ways_of(row, options)]
    ways += [(row, way) for row, _, way in (pair.partition(":") for pair in options.more)]
    ahead = len(ways) if options.together else 2
    started = [start(*way, options) for way in ways[:ahead]]
    for process in started if options.together else ():
        process.stdout.readline()  # it is ready, or has ended
    for number, (row, way) in enumerate(ways):
        result = {"row": row, "way": way} | finish(started[number], end - time.monotonic())
        started += [start(*way, options) for way in ways[number + ahead : number + ahead + 1]]
        results.append(result)
        print(line(result), flush=True)
        if options.json:
            device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
            about = {"device": device, "torch": torch.__version__, "settings": options.set}
            options.json.write_text(json.dumps({**about, "rows": results}, indent=1))


def ways_of(row: str, options: argparse.Namespace) -> list[str]:
    """Return the ways of a row that are measured, each once."""
    variants = (variant_way(name) for name in options.variants)
    return list(dict.fromkeys((*(options.ways or ROWS[row]["ways"]), *variants)))


def start(row: str, way: str, options: argparse.Namespace) -> Any:
    """Start the process of a way, which waits for its turn."""
    command = [sys.executable, __file__, "--one", row, way, "--device", options.device]
    command += ["--seconds", str(options.seconds), *(["--set", *options.set] if options.set else [])]
    command += ["--profile", str(options.profile)] if options.profile else []
    command += ["--together"] if options.together else []
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    process.errors = errors  # type: ignore[attr-defined]
    return process


def finish(process: Any, left_s: float) -> dict[str, Any]:
    """Let a process measure, and return what it found."""
    try:
        if left_s < 10:
            raise subprocess.TimeoutExpired(process.args, left_s)
        text, _ = process.communicate("measure\n", timeout=left_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": "no time left"}
    if process.returncode:
        process.errors.seek(0)
        return {"error": process.errors.read().strip()[-2000:]}
    measurement: dict[str, Any] = json.loads(text.splitlines()[-1])
    return measurement


def import_ahead(way: str) -> None:
    """Import what a way needs; the device is not touched."""
    if way.startswith("headway"):
        import headway.parallel
        import headway.plan.plan
        import headway.train.optim  # noqa: F401
    else:
        import diffusers

        _ = diffusers.WanTransformer3DModel, diffusers.DiTTransformer2DModel  # which are imported when named
    import torch._inductor.compile_fx  # noqa: F401


def compile_ahead(name: str, way: str, options: argparse.Namespace) -> None:
    """Run a step of a model of one layer: its block is compiled, and serves all layers of the measured model."""
    device = torch.device(options.device)
    step_of(ROWS[name] | {"model": ROWS[name]["model"] | {"layers": 1}}, way, device, options.set)[0]()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def step_of(row: dict[str, Any], way: str, device: torch.device, settings: list[str]) -> tuple[Step, float | None]:
    """Return a training step of a way, and the planned seconds of Headway's."""
    return (
        headway_step(row, way, device, settings)
        if way.startswith("headway")
        else (diffusers_step(row, way, device), None)
    )


def line(result: dict[str, Any]) -> str:
    """Return the table's row for people."""
    head = f"{result['row']:<19}{result['way']:<23}"
    if "error" in result:
        return head + result["error"].splitlines()[-1]
    text = f"{head}{result['seconds']:>8.4f}{result['gib']:>7.1f}{result['loss']:>8.4f}"
    if result.get("planned"):
        text += f"{result['planned']:>8.4f}{result['planned'] / result['seconds'] - 1:>+7.1%}"
    else:
        text += " " * 15
    text += f"  {result['first_s']:.0f} s"
    if result.get("waits"):
        text += f", the host waits: {result['waits']}"
    return text + (f", idle for data {result['idle_for_data']:.2%}" if "idle_for_data" in result else "")


def measured(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds per step (median of rounds), memory and the first loss of one way, in this process."""
    row, device = ROWS[name], torch.device(options.device)
    result: dict[str, Any] = {}
    began = time.perf_counter()
    step, planned = step_of(row, way, device, options.set)
    if planned is not None:
        result["planned"] = planned
    loss = float(step())
    result |= {"loss": loss, "first_s": time.perf_counter() - began}
    for _ in range(WARM):
        step()
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    count = max(2, round(options.seconds / ROUNDS / (time.perf_counter() - began)))
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(count):
            step()
        wait(device)
        seconds.append((time.perf_counter() - began) / count)
    result |= {"seconds": statistics.median(seconds), "rounds": seconds, "steps": count}
    result["last_loss"] = float(step())
    result["gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if way == "headway fed":
        result["idle_for_data"] = idle_for_data(step, device, count)
    elif device.type == "cuda":
        result["waits"] = host_waits(step)
        if options.profile:
            write_kernels(step, f"{name}, {way}", options.profile)
    return result


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_waits(step: Step) -> str:
    """Return where the host waits for the device in a step; empty where it does not."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def write_kernels(step: Step, name: str, file: Path) -> None:
    """Append the time of every kernel of a step to a file."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda e: -e.device_time_total)[:45]
    busy = sum(e.device_time_total for e in found.key_averages()) / 2e3
    text = [f"{e.device_time_total / 2e3:9.3f} ms {e.count // 2:5}  {e.key[:150]}" for e in rows]
    with file.open("a") as out:
        out.write(f"== {name}: {busy:.1f} ms of kernels per step\n" + "\n".join(text) + "\n")


# -- samples


def random_latents(row: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return noised latents, targets, times and conditions, the same for all ways."""
    from headway.models.noise import TRAINING, draw

    count, rng, model = row["batch"], np.random.default_rng(0), row["model"]
    drawn = draw(0, TRAINING, range(count), row["shape"])
    data, noise = (torch.from_numpy(x).to(device) for x in (rng.normal(size=drawn.noise.shape), drawn.noise))
    times = torch.from_numpy(drawn.uniform_N.astype(np.float32)).to(device)
    t = times.view(-1, 1, 1, 1, 1)
    if model["family"] == "dit":
        conditions = {"label": torch.arange(count, device=device) % model["num_classes"]}
    else:
        states = rng.normal(size=(count, model["text_tokens"], model["text_dim"])).astype(np.float32)
        conditions = {"text": torch.from_numpy(states).to(device)}
    return ((1 - t) * data + t * noise).float(), (noise - data).float(), times, conditions


class FiledLatents:
    """Latents and text states in files, as a cache would have them; a thread reads and draws one step ahead."""

    def __init__(self, row: dict[str, Any], device: torch.device) -> None:
        self.shape, self.device, self.row = row["shape"], device, 0
        folder = Path(tempfile.mkdtemp(prefix="latents-"))
        text = (row["model"]["text_tokens"], row["model"]["text_dim"])
        self.files = {"latents": (FILED, *self.shape), "text": (FILED, *text)}
        for name, shape in self.files.items():
            np.save(folder / f"{name}.npy", np.random.default_rng(0).normal(size=shape).astype(np.float16))
        self.latents, self.text = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.files)
        self.thread = ThreadPoolExecutor(1)
        self.ahead: Future[tuple[Tensor, ...]] = self.thread.submit(self.read, 0)

    def read(self, number: int) -> tuple[Tensor, ...]:
        """Return a sample, its noise, time and text, on the host."""
        from headway.models.noise import TRAINING, draw

        drawn = draw(0, TRAINING, [number], self.shape)
        data, text = (np.ascontiguousarray(file[number % FILED][None]) for file in (self.latents, self.text))
        return tuple(map(torch.from_numpy, (data, drawn.noise, drawn.uniform_N.astype(np.float32), text)))

    def take(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs, targets, times and text states of the next step, on the device."""
        from headway.models.transfer import on_device

        self.row += 1
        host, self.ahead = self.ahead.result(), self.thread.submit(self.read, self.row)
        data, noise, times, text = (on_device(x, self.device) for x in host)
        data, t = data.float(), times.view(-1, 1, 1, 1, 1)
        return (1 - t) * data + t * noise, noise - data, times, text


def idle_for_data(step: Step, device: torch.device, count: int) -> float:
    """Return the share of some steps that the device waits for data, as the trainer's meter counts it."""
    from headway.train.meter import make_meter

    meter = make_meter(device)
    meters.append(meter)
    found = []
    for number in range(count):
        found += meter.end(number, step().reshape(1))
    found += meter.drain()
    meters.clear()
    rest = found[1:]
    return sum(x.data_ns for x in rest) / sum(x.data_ns + x.compute_ns for x in rest)


meters = list[Any]()
"""The meter of `idle_for_data`, which a step of `headway fed` tells when it has its data."""


# -- steps


def headway_step(row: dict[str, Any], way: str, device: torch.device, settings: list[str]) -> tuple[Step, float]:
    """Return a training step of Headway, and its planned seconds on an H200."""
    from headway.kernels.dispatch import make_plain
    from headway.models.custom import empty_model
    from headway.parallel import World, parallelize_model, total_norm
    from headway.parallel.objective import LABEL, TEXT, TEXT_MASK, TIME, DeviceBatch, SumScale
    from headway.recipe.load import parse_recipe, with_settings
    from headway.recipe.sample_tokens import with_sample_tokens
    from headway.train.objectives.diffusion import BIN, WEIGHT, DenoisingLoss
    from headway.train.optim import build_optimizer, clip, set_step

    channels, frames, height, width = row["shape"]
    text = {"conditioning": "text"} if row["model"]["family"] == "wan" else {}
    media = {"sizes": f"{width}x{height}", "frames": frames}
    recompute = "selective" if way == "headway selective" else "none"
    train = {"batch": row["batch"], "dtype": "bfloat16", "lr": 1e-4, "recompute": recompute}
    values = {
        "model": {**row["model"], **text, "in_channels": 3},
        "data": {"kind": "video" if frames > 1 else "image", "path": "none", "media": media},
        "objective": {"kind": "flow", "bins": 1},
        "train": train | ({"deterministic": True} if way == "headway deterministic" else {}),
    }
    recipe = with_sample_tokens(with_settings(parse_recipe(values, {}, "benchmark"), settings))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"in_channels": channels})})
    make_plain(next((plain for name, plain in VARIANTS.items() if variant_way(name) == way), ()))
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in a worker
    world = World(rank=0, size=1, device=device)
    objective = DenoisingLoss(recipe.objective)
    spread = parallelize_model(empty_model(recipe.model), recipe, world, objective=objective)
    for buffer in spread.model.buffers():
        buffer.zero_()
    draw_weights(spread.model)
    optimizer = build_optimizer(spread.model, recipe.train, 0, world)
    ones = torch.ones(row["batch"], device=device)
    columns = {WEIGHT: ones, BIN: torch.zeros(row["batch"], dtype=torch.int64, device=device)}
    mask = ones.bool().unsqueeze(1).expand(-1, row["model"].get("text_tokens", 0)).contiguous()
    filed = FiledLatents(row, device) if way == "headway fed" else None
    same = random_latents(row, device) if filed is None else None

    def batch() -> DeviceBatch:
        if filed is not None:
            inputs, targets, times, states = filed.take()
            return DeviceBatch(inputs, targets, None, {**columns, TIME: times, TEXT: states, TEXT_MASK: mask})
        assert same is not None
        inputs, targets, times, conditions = same
        given = {LABEL: conditions["label"]} if "label" in conditions else {TEXT: conditions["text"], TEXT_MASK: mask}
        return DeviceBatch(inputs, targets, None, {**columns, TIME: times, **given})

    scale, parameters, done = SumScale((1 / row["batch"],), 1 / row["batch"]), dict(spread.model.named_parameters()), 0

    def step() -> Tensor:
        nonlocal done
        done += 1
        for meter in meters:
            meter.begin()
        taken = batch()
        for meter in meters:
            meter.compute()
        set_step(optimizer.param_groups, done, 1e-4)
        values = spread.passes(taken, scale)
        clip(optimizer, parameters.values(), total_norm(parameters, world, spread.borrowed), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return values.sum()

    return step, planned_seconds(recipe)


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draw weights on the device, which takes less time than the trainer's on the host."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(float(name.endswith("norm.weight")))


@cache
def h200() -> Any:
    """Return the cluster of one H200."""
    from headway.hardware import parse_on

    return parse_on("h200x1")


def planned_seconds(recipe: Any) -> float:
    """Return the planned step time, by the ceilings that `headway plan` takes for an H200."""
    from headway.plan.plan import plan

    return float(plan(recipe, h200(), fidelity="measured").result.plans[0].estimate.step.seconds)


def diffusers_step(row: dict[str, Any], way: str, device: torch.device) -> Step:
    """Return a training step of diffusers' model in plain PyTorch."""
    import diffusers

    settings, channels = row["model"], row["shape"][0]
    heads = {"num_attention_heads": settings["heads"], "attention_head_dim": settings["dim"] // settings["heads"]}
    with torch.device(device):
        if settings["family"] == "wan":
            model = diffusers.WanTransformer3DModel(
                **heads, in_channels=channels, out_channels=channels, text_dim=settings["text_dim"],
                ffn_dim=settings["hidden"], num_layers=settings["layers"],
            )  # fmt: skip
        else:
            model = diffusers.DiTTransformer2DModel(
                **heads, in_channels=channels, out_channels=channels, num_layers=settings["layers"],
                num_embeds_ada_norm=settings["num_classes"], sample_size=settings["base_size"],
            )  # fmt: skip
    model.train()
    if row.get("peer_recomputes"):
        model.enable_gradient_checkpointing()
    forward = torch.compile(model) if way.endswith("whole") else model
    if way.endswith("compiled"):
        for block in model.blocks if settings["family"] == "wan" else model.transformer_blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    inputs, targets, times, conditions = random_latents(row, device)

    def predict() -> Tensor:
        if "text" in conditions:
            return forward(inputs, times * 1000, conditions["text"], return_dict=False)[0]
        return forward(inputs[:, :, 0], times * 1000, conditions["label"], return_dict=False)[0].unsqueeze(2)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            predicted = predict()
        loss = (predicted.float() - targets).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic rows need it; as in workers
    main()
