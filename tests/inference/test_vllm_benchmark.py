"""vLLM's side of the inference benchmark has the workloads of Headway's, and one model's trouble is not another's."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.models import empty_decoder
from headway.recipe.huggingface import model_from_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """Without the benchmarks' folder on sys.path, where `kernels` and `state` would be found."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VLLM = benchmark("vllm_gpu")


def test_shapes_prompts_lengths_and_operations_are_those_of_headways_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    headway = benchmark("inference_gpu")

    def engine(config: dict[str, Any], *_: Any, **__: Any) -> Any:
        module = empty_decoder(model_from_config(config), "meta")
        return SimpleNamespace(model=SimpleNamespace(module=module), config=config)

    def throughput(llm: Any, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        return {"seconds": [1.0], "workload": (llm.config, prompts, lengths)}

    monkeypatch.setattr(headway, "engine", engine)
    monkeypatch.setattr(headway, "throughput", throughput)
    rows = {name: row for part in (headway.small, headway.large, headway.prefills) for name, row in part()}
    peers = {workload.name: (part, workload) for part in VLLM.PARTS.values() for workload in part.workloads()}
    assert peers.keys() == rows.keys()
    for name, (part, workload) in peers.items():
        assert (part.shape, workload.prompts, workload.lengths) == rows[name]["workload"], name
        assert round(workload.operations / 1e12) == rows[name].get("tflops", 0), name


def test_each_cache_holds_all_sequences_of_its_workloads_at_once() -> None:
    for part in VLLM.PARTS.values():
        shape = part.shape
        token_bytes = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        for workload in part.workloads():
            pairs = list(zip(map(len, workload.prompts), workload.lengths, strict=True))
            assert max(before + after for before, after in pairs) <= part.context
            # All start at once, as prefill takes few passes; those of at least n tokens still run at the n-th.
            tokens = max(sum(before + n for before, after in pairs if after >= n) for n in set(workload.lengths))
            assert tokens * token_bytes * 1.1 < part.cache_gib * 2**30, workload.name


def test_late_models_are_timed_after_the_others_and_failures_leave_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "vllm.json"
    command = [sys.executable, str(BENCHMARKS / "vllm_gpu.py"), "--modes", "off", "--limit", "6", "--json", str(out)]
    fake = ["--fake", "Llama-3.2-1B=8", "Llama-3-8B=fail"]
    done = subprocess.run([*command, *fake], capture_output=True, text=True, timeout=120)
    results = json.loads(out.read_text())
    assert done.returncode == 1
    assert results["errors"] == {"Llama-3-8B": {"off": "RuntimeError: asked to fail"}}
    assert list(results["rows"]) == [
        "Qwen3-0.6B shape, batch 1", "Qwen3-0.6B shape, 256 sequences", "Llama 1B shape, batch 1"
    ]  # fmt: skip
    assert all(row["off"]["tokens_per_s"] > 0 for row in results["rows"].values())
    assert "| Llama 1B shape, batch 1 |" in done.stdout
