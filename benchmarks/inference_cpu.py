"""Batched decoding on a CPU: Headway's engine and transformers' generate on the same folder, in turns.

    python benchmarks/inference_cpu.py FOLDER [--batch 8] [--tokens 64] [--turns 3] [--threads N]

Greedy, float32, prompts of different lengths (transformers pads them on the left). `exact_tokens` counts the engine's
tokens that transformers, run on the same sequence without padding, ranks first; `padded_tokens` those that its own
padded generation also gave. The ratio is that of the medians; `cpu_ratio` is that of the least CPU-seconds, which other
load on the machine changes little where `--threads 1` leaves no thread to wait for another.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from headway.inference import LLM, EngineOptions, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    llm = LLM(asked.folder, device="cpu", options=EngineOptions(cache_tokens=8192))
    peer = AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    lengths = [16 + 7 * (i % 8) for i in range(asked.batch)]
    prompts = [torch.randint(100, 20000, (length,), generator=generator).tolist() for length in lengths]

    def ours() -> list[list[int]]:
        params = SamplingParams(max_tokens=asked.tokens, temperature=0, ignore_eos=True)
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]

    def theirs() -> list[list[int]]:
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
        with torch.inference_mode():
            made = peer.generate(
                ids, attention_mask=mask, max_new_tokens=asked.tokens, min_new_tokens=asked.tokens,
                do_sample=False, repetition_penalty=1.0, pad_token_id=0,
            )  # fmt: skip
        return [row[longest:].tolist() for row in made]

    first, second = ours(), theirs()
    exact = sum(_ranked_first(peer, prompt, tokens) for prompt, tokens in zip(prompts, first, strict=True))
    same = sum(a == b for mine, other in zip(first, second, strict=True) for a, b in zip(mine, other, strict=True))
    seconds: dict[str, list[float]] = {"headway": [], "transformers": []}
    cpu_seconds: dict[str, list[float]] = {"headway": [], "transformers": []}
    for _ in range(asked.turns):
        for name, run in (("headway", ours), ("transformers", theirs)):
            wall, cpu = _timed(run)
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    count = asked.batch * asked.tokens
    rates = {name: count / statistics.median(values) for name, values in seconds.items()}
    result = {
        "batch": asked.batch,
        "tokens": count,
        "exact_tokens": exact,
        "padded_tokens": same,
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["headway"] / rates["transformers"], 2),
        "cpu_ratio": round(min(cpu_seconds["transformers"]) / min(cpu_seconds["headway"]), 2),
        "threads": asked.threads,
        "load": [round(value, 1) for value in os.getloadavg()],
        "seconds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
        "cpu_seconds": {name: [round(value, 2) for value in values] for name, values in cpu_seconds.items()},
    }
    print(json.dumps(result))


@torch.inference_mode()
def _ranked_first(peer: torch.nn.Module, prompt: list[int], tokens: list[int]) -> int:
    logits = peer(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return int((logits.argmax(-1) == torch.tensor(tokens)).sum())


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
