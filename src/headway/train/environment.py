"""The environment of a run: what bitwise equality depends on, and the facts behind MFU."""

import json
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headway.hardware import find_chip
from headway.plan import flops_per_token, flops_per_token_full_attention, parameters
from headway.plan.flops import weight_gradient_flops
from headway.recipe import Assignment, Recipe
from headway.track import write_json
from headway.train.build import Parts
from headway.train.custom_init import draw_facts


def record_environment(parts: Parts, assignment: Assignment) -> None:
    """Write environment.json; record what changed since an earlier attempt."""
    now = environment(parts, assignment)
    file = parts.run.environment_file
    before = read_environment(file)
    if before is not None:
        changed = {key: [before.get(key), now[key]] for key in now if before.get(key) != now[key]}
        if changed:
            parts.recorder.event("log", message="later steps may differ bitwise", changed=changed)
    write_json(file, now)


def read_environment(file: Path) -> dict[str, Any] | None:
    """Return the environment of an earlier attempt; None if it is missing or unreadable."""
    try:
        before = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return before if isinstance(before, dict) else None


def environment(parts: Parts, assignment: Assignment) -> dict[str, Any]:
    """Everything that bit-for-bit equality depends on."""
    return {
        "workers": assignment.workers,
        "mesh": {name: axis.size for name, axis in parts.world.axes.items()},
        "device": device_name(parts.world.device),
        "threads": torch.get_num_threads(),
        "deterministic": parts.recipe.train.deterministic or assignment.device == "cpu",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: metadata.version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        "data_version": parts.data_version,
    }


def record_facts(parts: Parts) -> None:
    """Record the facts behind MFU. Every worker measures, so that none runs ahead; rank 0 records."""
    recipe, device = parts.recipe, parts.world.device
    peak, source = peak_flops(device, recipe.train.dtype)
    if not parts.world.first:
        return
    parts.recorder.event(
        "facts",
        **(model_facts(recipe) if recipe.model.class_ is None else draw_facts(parts.run)),
        peak_flops=peak,
        peak_source=source,
        device=device_name(device),
        total_steps=recipe.train.steps,
        tokens_per_step=recipe.train.sequences(recipe.train.steps) * recipe.data.seq // recipe.train.steps,
    )


def model_facts(recipe: Recipe) -> dict[str, Any]:
    """Return a model's FLOPs per token."""
    arch = recipe.model.architecture()
    # A frozen base has no gradients of weights, a third of what its matrices take.
    frozen = weight_gradient_flops(arch, recipe.data.seq) if recipe.lora is not None else 0
    return {
        "parameters": parameters(arch),
        "flops_per_token": flops_per_token(arch, recipe.data.seq) - frozen,
        "flops_per_token_full_attention": flops_per_token_full_attention(arch, recipe.data.seq) - frozen,
    }


def peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """Return a device's dense peak FLOP/s: the vendor's for a known GPU, measured for a CPU."""
    if device.type == "cuda":
        chip = find_chip(device_name(device))
        return (chip.peaks.get(dtype), chip.source) if chip else (None, "unknown chip")
    return measured_matmul(), "best of 5 float32 products of 512 x 512 matrices, all workers at once"


def measured_matmul(size: int = 512, tries: int = 5) -> float:
    """Measure the FLOP/s of a matrix product on this worker's threads."""
    generator = torch.Generator()  # separate: the run's random state was just restored
    a, b = (torch.rand(size, size, generator=generator) for _ in range(2))
    best = float("inf")
    for _ in range(tries):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def device_name(device: torch.device) -> str:
    """Return the device's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
