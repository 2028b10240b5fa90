"""The engine on one GPU: does it generate what a pass without a cache does, and how fast?

    python benchmarks/inference_gpu.py [OUT.json] [--only starts small exact large prefill kernel families]

Random weights: speed does not depend on their values. The workload of 256 sequences is nano-vllm's, as in the figures
for vLLM beside it (benchmarks/results/inference_h200.md).
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from headway.hardware import default_cluster, known_chip
from headway.inference import LLM, EngineOptions, LoadedModel, SamplingParams
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_reference import reference
from headway.kernels.paged_triton import triton_attention
from headway.models import Decoder, empty_decoder
from headway.plan.costs import make_cost_model
from headway.plan.serving_latency import PassModel
from headway.plan.serving_workload import EngineLimits, Request, forecast
from headway.recipe import Model
from headway.recipe.huggingface import model_from_config

CUDA = torch.device("cuda")
STARTED = psutil.Process().create_time()
MARGINS = {torch.bfloat16: 0.125, torch.float32: 1e-3}
"""bfloat16 logits around 16 are 0.125 apart: below that, which of two tokens is best is chance."""

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_8B = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL | {"model_type": "llama", "rope_theta": 1e4},
    "Qwen3": SMALL | {"model_type": "qwen3", "rope_theta": 1e4},
    "Gemma 3": SMALL | {
        "model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64,
        "rope_theta": 1e4, "rope_local_base_freq": 1e3, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "Mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4},
}  # fmt: skip


def load(config: dict[str, Any], dtype: torch.dtype, std: float = 0.02, context: int = 4096) -> LoadedModel:
    model: Model = model_from_config(config)
    decoder: Decoder = empty_decoder(model, CUDA).to(dtype).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, std)
            elif config["model_type"].startswith("gemma"):
                parameter.zero_()
            else:
                parameter.fill_(1)
    return LoadedModel("random", decoder, CUDA, model.vocabulary, context)


def equal_to_whole_passes(name: str, dtype: torch.dtype, graphs: bool) -> dict[str, Any]:
    """Greedy tokens of 12 requests in a small cache, each held against a pass over all of its tokens."""
    loaded = load(FAMILIES[name], dtype, std=0.1)
    options = EngineOptions(cache_tokens=1200, max_batch_tokens=128, max_sequences=12, graphs=graphs)
    llm = LLM(loaded, options=options)
    draw = random.Random(0)
    prompts = [[draw.randrange(1000) for _ in range(draw.randint(1, 150))] for _ in range(12)]
    results = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    tokens = wrong = 0
    for prompt, result in zip(prompts, results, strict=True):
        ids = result.outputs[0].token_ids
        with torch.inference_mode():
            logits = loaded.module(torch.tensor([prompt + ids], device=CUDA))[0, len(prompt) - 1 : -1].float()
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(ids, device=CUDA).unsqueeze(1)).squeeze(1)
        tokens += len(ids)
        wrong += int((best - chosen > MARGINS[dtype]).sum())
    engine = llm.engine.engine
    captured = engine.runner.graphs is not None  # type: ignore[attr-defined]
    return {
        "tokens": tokens, "beyond_the_margin": wrong, "preemptions": engine.counts.preemptions, "graphs": captured
    }  # fmt: skip


def kernel_against_reference() -> dict[str, float]:
    """Largest difference of the Triton kernel from PyTorch, by what attention has."""
    worst: dict[str, float] = {}
    for dtype, heads, size in (
        (torch.float32, (16, 8), 128),
        (torch.bfloat16, (16, 8), 128),
        (torch.bfloat16, (8, 1), 256),
    ):
        for spans in ([(1, 3000), (1, 17)], [(1, 100)] * 70, [(300, 300), (70, 500), (1, 90), (1, 1)]):
            q, keys, values, batch = _pages(spans, heads, size, dtype)
            for options in ({}, {"window": 100}, {"softcap": 5.0}, {"sinks_N": torch.linspace(-1, 1, heads[0]).cuda()}):
                ours = triton_attention(q, keys, values, batch, size**-0.5, **options)  # type: ignore[arg-type]
                truth = reference(q.float(), keys.float(), values.float(), batch, size**-0.5, **options)  # type: ignore[arg-type]
                key = f"{str(dtype).removeprefix('torch.')} {size} {next(iter(options), 'plain')}"
                worst[key] = max(worst.get(key, 0.0), float((ours.float() - truth).abs().max()))
    return worst


def _pages(spans: list[tuple[int, int]], heads: tuple[int, int], size: int, dtype: torch.dtype) -> Any:
    count = sum(-(-total // 16) for _, total in spans)
    order = torch.randperm(count).tolist()
    tables = [[order.pop() for _ in range(-(-total // 16))] for _, total in spans]
    widest = max(map(len, tables))
    starts = [0]
    for new, _ in spans:
        starts.append(starts[-1] + new)
    lengths = tuple(total for _, total in spans)
    batch = PagedBatch(
        tuple(starts), lengths, torch.tensor(starts, dtype=torch.int32, device=CUDA),
        torch.tensor(lengths, dtype=torch.int32, device=CUDA),
        torch.tensor([t + [0] * (widest - len(t)) for t in tables], dtype=torch.int32, device=CUDA),
        torch.zeros(starts[-1], dtype=torch.int64, device=CUDA),
    )  # fmt: skip
    keys, values = (torch.randn(count, 16, heads[1], size, device=CUDA).to(dtype) for _ in range(2))
    return torch.randn(starts[-1], heads[0], size, device=CUDA).to(dtype), keys, values, batch


def engine(config: dict[str, Any], context: int = 4096, **options: Any) -> LLM:
    """An engine with its kernels compiled."""
    gc.collect()
    torch.cuda.empty_cache()
    chosen = EngineOptions(**{"memory_share": 0.8, "max_batch_tokens": 16384, **options})
    llm = LLM(load(config, torch.bfloat16, context=context), options=chosen)
    few = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=8)
    llm.generate([[7] * length for length in (128, 600, 1200)], few)
    llm.generate([[5] * 300] * min(chosen.max_sequences, 8), few)
    return llm


def throughput(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Tokens per second, the best of three runs."""
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count, seed=0) for count in lengths]
    runs = []
    for number in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        llm.generate([[number, *prompt[1:]] for prompt in prompts], params)  # nothing is shared with the run before
        torch.cuda.synchronize()
        runs.append(round(time.perf_counter() - started, 3))
    return {
        "tokens": sum(lengths),
        "seconds": runs,
        "tokens_per_s": round(sum(lengths) / min(runs), 1),
        "planned_over_measured_seconds": round(planned_seconds(llm, prompts, lengths) / min(runs), 3),
    }


def planned_seconds(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """What `headway plan --serve --requests` says of a workload."""
    decoder, engine = llm.model.module, llm.engine.engine
    assert isinstance(decoder, Decoder)
    cluster = default_cluster(known_chip(torch.cuda.get_device_name()), 1)
    exact = engine.runner.pages.exact  # type: ignore[attr-defined]
    model = PassModel(decoder.model.architecture(), make_cost_model(cluster), exact=exact)
    cache_tokens = engine.pool.count * engine.pool.size
    limits = EngineLimits(engine.limits.max_sequences, engine.limits.max_batch_tokens, cache_tokens)
    requests = [Request(len(prompt), length) for prompt, length in zip(prompts, lengths, strict=True)]
    return forecast(model, requests, limits).seconds


def prefill(config: dict[str, Any], sequences: int, length: int) -> dict[str, Any]:
    """TFLOP/s of whole prompts in one pass, the head's included for the last tokens only."""
    options = {"max_batch_tokens": sequences * length, "max_sequences": sequences, "shares_prefixes": False}
    llm = engine(config, 2 * length, graphs=False, **options)
    prompts = [[draw % 1000] * length for draw in range(sequences)]
    measured = throughput(llm, prompts, [1] * sequences)
    seconds = min(measured["seconds"])
    decoder = llm.model.module
    assert isinstance(decoder, Decoder)
    weights = sum(p.numel() for name, p in decoder.named_parameters() if "embed" not in name and "head" not in name)
    pairs = sequences * length**2 / 2 * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    operations = 2 * sequences * length * weights + 4 * pairs
    return measured | {"tflops": round(operations / seconds / 1e12)}


def random_prompts(count: int, shortest: int, longest: int) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]
    return prompts, [draw.randint(shortest, longest) for _ in range(count)]


SINGLE = random_prompts(1, 128, 128)[0]
Rows = Iterator[tuple[str, Any]]


def starts() -> Rows:
    """A process's start to its first tokens, with empty caches of compiled kernels and with those of the first."""
    with tempfile.TemporaryDirectory() as cache:
        places = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        for caches in ("cold", "warm"):
            command = [sys.executable, __file__, "--only", "start"]
            started = time.perf_counter()
            child = subprocess.run(command, env=os.environ | places, stdout=subprocess.PIPE, text=True, check=True)
            yield (
                f"Llama 1B shape, start to first tokens, {caches}",
                {"engine_s": json.loads(child.stdout), "process_s": round(time.perf_counter() - started, 1)},
            )


def start() -> Rows:
    """What the process of one start does and prints."""
    engine(LLAMA, max_sequences=8)
    print(round(time.time() - STARTED, 1))
    yield from ()


def small() -> Rows:
    yield "Llama 1B shape, batch 1", throughput(engine(LLAMA, max_sequences=8), SINGLE, [512])
    llm = engine(QWEN3)
    yield "Qwen3-0.6B shape, batch 1", throughput(llm, SINGLE, [512])
    yield "Qwen3-0.6B shape, 256 sequences", throughput(llm, *random_prompts(256, 100, 1024))


def exact() -> Rows:
    llm = engine(QWEN3, exact=True)
    yield "Qwen3-0.6B shape, batch 1, exact mode", throughput(llm, SINGLE, [512])
    yield "Qwen3-0.6B shape, 256 sequences, exact mode", throughput(llm, *random_prompts(256, 100, 1024))


def large() -> Rows:
    llm = engine(LLAMA_8B, max_sequences=128)
    yield "Llama 8B shape, batch 1", throughput(llm, SINGLE, [256])
    yield "8B, 128 sequences, 1,000 in, 300 out", throughput(llm, random_prompts(128, 1000, 1000)[0], [300] * 128)


def prefills() -> Rows:
    yield "prefill of 8B, 8 x 4,096", prefill(LLAMA_8B, 8, 4096)


def kernels() -> Rows:
    yield "kernel, largest difference", kernel_against_reference()


def families() -> Rows:
    for name in FAMILIES:
        for dtype, graphs in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)):
            kind = f"{str(dtype).removeprefix('torch.')}, {'graphs' if graphs else 'eager'}"
            yield f"{name} against whole passes, {kind}", equal_to_whole_passes(name, dtype, graphs)


PARTS: dict[str, Callable[[], Rows]] = {
    "starts": starts, "small": small, "exact": exact, "large": large, "prefill": prefills, "kernel": kernels,
    "families": families,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "start"], default=list(PARTS))
    asked = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in asked.only:
        for name, value in (PARTS | {"start": start})[part]():
            results[name] = value
            print(f"{time.time() - STARTED:6.1f} {name}", value, flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
